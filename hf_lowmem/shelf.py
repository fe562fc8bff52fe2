"""Where layers rest while they are not in use: a ``Shelf``."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from typing import Protocol

import torch
from torch import Tensor

from .layer import Layer
from .memory import PinnedArena

PASSING = 3  # gradients on their way: one being read, one that has arrived, one that comes


class Shelf(Protocol):
    """Layers by their number. What ``weights`` and ``gradients`` return is ordinary host memory, ``uint8[nbytes]``."""

    def weights(self, number: int) -> Tensor:
        """The home of a layer's bytes."""

    def coded(self, number: int) -> Tensor:
        """The home of what crosses the link instead of a layer's weights, where that is something else."""

    def gradients(self, number: int) -> Tensor:
        """The home of the gradients of a layer's trainable tensors."""

    def drop(self, number: int) -> None:
        """Gives a layer's places back, and forgets what is in them."""

    def borrow(self, number: int) -> Tensor:
        """A passing place for these gradients; waits until one is free."""

    def give_back(self, number: int, slab: Tensor) -> None:
        """Frees a passing place."""


class RamShelf:
    """Layers in RAM, pinned where a GPU is to copy them. Every slab is one allocation of its exact size.

    Args:
        layers: what rests here.
        gradients: for each, the layer of its gradients; None where nothing in it is trained. Their memory is taken at
            the first backward.
        pin: whether a GPU copies from and to it.
        coded: for each, the layer of what crosses the link instead; None where it does itself.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        gradients: Sequence[Layer | None],
        pin: bool,
        coded: Sequence[Layer | None] | None = None,
    ) -> None:
        self._layers, self._gradient_layers, self._pin = layers, gradients, pin
        self._arenas: dict[int, PinnedArena] = {}  # by address of the slab
        self._weights: list[Tensor | None] = [None] * len(layers)
        self._gradients: list[Tensor | None] = [None] * len(layers)
        self._coded_layers = [None] * len(layers) if coded is None else coded
        self._coded: list[Tensor | None] = [None] * len(layers)
        self._passing: dict[int, tuple[int, Queue[Tensor]]] = {}  # by size: how many there are, and those that are free

    def weights(self, number: int) -> Tensor:
        """See ``Shelf``; taken at the first call, so that a model moves here layer by layer."""
        return self._slab(self._weights, number, self._layers[number])

    def gradients(self, number: int) -> Tensor:
        """See ``Shelf``. Raises: ValueError if nothing in the layer is trained."""
        layer = self._gradient_layers[number]
        if layer is None:
            raise ValueError(f"layer {number} has no gradients: nothing in it is trained")
        return self._slab(self._gradients, number, layer)

    def coded(self, number: int) -> Tensor:
        """See ``Shelf``. Raises: ValueError if the layer's own weights cross the link."""
        layer = self._coded_layers[number]
        if layer is None:
            raise ValueError(f"layer {number} crosses the link as it is: none of its weights is written in few bits")
        return self._slab(self._coded, number, layer)

    def drop(self, number: int) -> None:
        """See ``Shelf``. All are taken anew when they are asked for again."""
        for slabs in (self._weights, self._gradients, self._coded):
            slab = slabs[number]
            if slab is not None:
                self._arenas.pop(slab.data_ptr(), None)
                slabs[number] = None

    def borrow(self, number: int) -> Tensor:
        """See ``Shelf``. There are ``PASSING`` places for each size of a layer."""
        layer = self._gradient_layers[number]
        assert layer is not None
        count, free = self._passing.setdefault(layer.nbytes, (0, Queue()))
        if free.empty() and count < PASSING:
            self._passing[layer.nbytes] = (count + 1, free)
            return self._new_slab(layer.nbytes)
        return free.get()

    def give_back(self, number: int, slab: Tensor) -> None:
        """See ``Shelf``. Any thread may do it."""
        self._passing[slab.numel()][1].put(slab)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs taken so far."""
        taken = sum(slab.numel() for slab in (*self._weights, *self._gradients, *self._coded) if slab is not None)
        return taken + sum(size * count for size, (count, _) in self._passing.items())

    def _slab(self, slabs: list[Tensor | None], number: int, layer: Layer) -> Tensor:
        slab = slabs[number]
        if slab is None:
            slab = slabs[number] = self._new_slab(layer.nbytes)
        return slab

    def _new_slab(self, nbytes: int) -> Tensor:
        if not self._pin:
            return torch.empty(nbytes, dtype=torch.uint8)
        arena = PinnedArena([nbytes])
        self._arenas[arena.parts[0].data_ptr()] = arena
        return arena.parts[0]
