"""Where layers rest while they are not in use: a ``Shelf``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .layer import Layer
from .memory import PinnedArena


class Shelf(Protocol):
    """Layers by their number. What ``weights`` and ``gradients`` return is ordinary host memory, ``uint8[nbytes]``."""

    def weights(self, number: int) -> Tensor:
        """The home of a layer's bytes."""

    def gradients(self, number: int) -> Tensor:
        """The home of the gradients of a layer's trainable tensors."""


class RamShelf:
    """Layers in RAM, pinned where a GPU is to copy them. Every slab is one allocation of its exact size.

    Args:
        layers: what rests here.
        gradients: for each, the layer of its gradients; None where nothing in it is trained. Their memory is taken at
            the first backward.
        pin: whether a GPU copies from and to it.
    """

    def __init__(self, layers: Sequence[Layer], gradients: Sequence[Layer | None], pin: bool) -> None:
        self._layers, self._gradient_layers, self._pin = layers, gradients, pin
        self._arenas: list[PinnedArena] = []
        self._weights: list[Tensor | None] = [None] * len(layers)
        self._gradients: list[Tensor | None] = [None] * len(layers)

    def weights(self, number: int) -> Tensor:
        """See ``Shelf``; taken at the first call, so that a model moves here layer by layer."""
        return self._slab(self._weights, number, self._layers[number])

    def gradients(self, number: int) -> Tensor:
        """See ``Shelf``. Raises: ValueError if nothing in the layer is trained."""
        layer = self._gradient_layers[number]
        if layer is None:
            raise ValueError(f"layer {number} has no gradients: nothing in it is trained")
        return self._slab(self._gradients, number, layer)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs taken so far."""
        return sum(slab.numel() for slab in (*self._weights, *self._gradients) if slab is not None)

    def _slab(self, slabs: list[Tensor | None], number: int, layer: Layer) -> Tensor:
        slab = slabs[number]
        if slab is None:
            if self._pin:
                arena = PinnedArena([layer.nbytes])
                self._arenas.append(arena)
                slab = arena.parts[0]
            else:
                slab = torch.empty(layer.nbytes, dtype=torch.uint8)
            slabs[number] = slab
        return slab
