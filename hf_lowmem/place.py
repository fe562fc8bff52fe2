"""Where a block's tensors are, at home and on the device: ``Place``, and ``CodedPlace`` for weights in few bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .block import Block
from .coding import decode, encode
from .layer import Layer
from .link import Link, Slot
from .shelf import Shelf

SAMPLE = 61  # values of a weight that are looked at, to see whether somebody has written it unnoticed


class Copy:
    """A layer's bytes on the device: the slot, its views, and the ticket of the fetch that fills it."""

    def __init__(self, layer: Layer, device: torch.device, debug: bool) -> None:
        self.slot = Slot(layer.nbytes, device, debug)
        self.views = layer.views(self.slot.buffer)
        self.slot.empty()
        self.ticket: Any = None
        self.there = False


class Place:
    """Where a block's tensors are, at home and on the device."""

    def __init__(self, block: Block, shelf: Shelf, device: torch.device, debug: bool) -> None:
        self.block, self.shelf = block, shelf
        self.home = block.layer.views(shelf.weights(block.number))
        for (_, p), view in zip(block.params, self.home, strict=True):
            if p.data_ptr() != view.data_ptr():  # not loaded into its place
                view.copy_(p.data)
            p.data = view
        self.weights = Copy(block.layer, device, debug)
        self.gradients = None if block.gradient_layer is None else Copy(block.gradient_layer, device, debug)
        self.gradient_home: list[Tensor] = []  # views of the shelf's place, once it has been taken
        self.bound = False
        self._round, self._versions = -1, [0]

    def is_for(self, number: int) -> None:
        """Says for which round the copy of the weights has been fetched just now."""
        self._round, self._versions = number, self._now()

    def is_of(self, number: int) -> bool:
        """Whether the copy of the weights is for this round, and nobody has written them since through torch."""
        return self._round == number and self._versions == self._now()

    def _now(self) -> list[int]:
        return [p._version for _, p in self.block.params]

    def has_moved(self, home: list[Tensor]) -> None:
        """Says where the parameters lie from here on, and that the shelf's places are no more what they were."""
        self.home, self.gradient_home = home, []

    @property
    def there(self) -> bool:
        """Whether the weights are on the device, or on their way."""
        return self.weights.there

    @property
    def passing_bytes(self) -> int:
        """Bytes of the device that the weights take now, of a block that does not stay."""
        return self.weights.slot.nbytes if self.weights.there else 0

    def fetch(self, link: Link) -> None:
        """Starts the weights on their way."""
        self.weights.ticket = link.fetch(self.weights.slot, self.shelf.weights(self.block.number))
        self.weights.there = True

    def bind(self, link: Link) -> None:
        """Has the parameters lie in the slot."""
        if self.bound:
            return
        link.use(self.weights.ticket)
        for (_, p), view in zip(self.block.params, self.weights.views, strict=True):
            p.data = view
        self.bound = True

    def unbind(self) -> None:
        """Has the parameters lie at home."""
        if self.bound:
            for (_, p), view in zip(self.block.params, self.home, strict=True):
                p.data = view
            self.bound = False

    def release(self, link: Link) -> None:
        """Gives the slot's memory back, and that of the gradients' slot."""
        self.unbind()
        for copy in (self.weights, self.gradients):
            if copy is not None and copy.there:
                link.release(copy.slot)
                copy.there = False


class CodedPlace(Place):
    """The same for a block whose weights cross the link in few bits, and are seen by the device as those bits say.

    [Note: what the device sees] Weights are written in few bits at home, by the optimizer's thread after each update,
    and read on the device, into a slot of the computing stream's own, when the block begins. A block that stays on the
    device does both there, so that what it computes does not depend on where it rests. Gradients are those of the
    weights as they were read (straight through), the update is of those at home.

    Home may be written by others between two steps. Through torch, that shows in the versions of the parameters; a
    sample of their values shows most of what is written through ``.data``.
    """

    def __init__(self, block: Block, shelf: Shelf, device: torch.device, debug: bool) -> None:
        super().__init__(block, shelf, device, debug)
        assert block.coded_layer is not None
        self.codes = Copy(block.coded_layer, device, debug)
        self._encoded: list[tuple[int, int]] = []

    @property
    def there(self) -> bool:
        """See ``Place``."""
        return self.codes.there or self.weights.there

    @property
    def passing_bytes(self) -> int:
        """See ``Place``."""
        return sum(copy.slot.nbytes for copy in (self.codes, self.weights) if copy.there)

    def has_moved(self, home: list[Tensor]) -> None:
        """See ``Place``."""
        super().has_moved(home)
        self._encoded = []

    def encode(self, threads: int | None = None) -> None:
        """Writes the codes at home anew."""
        found = self._state_of_home()
        assert self.block.coded_layer is not None
        slab = self.shelf.coded(self.block.number)
        self._write(self.home, self.block.coded_layer.views(slab), threads)
        self._encoded = found

    def _state_of_home(self) -> list[tuple[int, int]]:
        return [(p._version, _sample(home)) for (_, p), home in zip(self.block.params, self.home, strict=True)]

    def _write(self, home: list[Tensor], coded: list[Tensor], threads: int | None = None) -> None:
        work, parts = [], iter(coded)
        for (_, p), tensor in zip(self.block.params, home, strict=True):
            form, part = self.block.forms.get(p), next(parts)
            if form is None:
                part.copy_(tensor)
            else:
                work.append((tensor, form, part, next(parts)))
        encode(work, threads)

    def _read(self) -> None:
        work, parts = [], iter(self.codes.views)
        for (_, p), view in zip(self.block.params, self.weights.views, strict=True):
            form, part = self.block.forms.get(p), next(parts)
            if form is None:
                view.copy_(part)
            else:
                work.append((part, next(parts), form, view))
        decode(work)

    def fetch(self, link: Link) -> None:
        """See ``Place``."""
        if self._encoded != self._state_of_home():
            self.encode()
        self.codes.ticket = link.fetch(self.codes.slot, self.shelf.coded(self.block.number))
        self.codes.there = True

    def bind(self, link: Link) -> None:
        """See ``Place``."""
        if self.bound:
            return
        if not self.weights.there:
            if self.block.kept:
                self.codes.slot.fill()
                self._write(self.home, self.codes.views)
            else:
                link.use(self.codes.ticket)
            self.weights.slot.fill()
            self.weights.there = True
            self._read()
            if self.block.kept:
                self.codes.slot.empty()
            else:
                link.release(self.codes.slot)
            self.codes.there = False
        for (_, p), view in zip(self.block.params, self.weights.views, strict=True):
            p.data = view
        self.bound = True

    def release(self, link: Link) -> None:
        """See ``Place``."""
        self.unbind()
        if self.codes.there:
            link.release(self.codes.slot)
            self.codes.there = False
        if self.weights.there:  # the computing stream's own
            self.weights.slot.empty()
            self.weights.there = False
        if self.gradients is not None and self.gradients.there:
            link.release(self.gradients.slot)
            self.gradients.there = False


def _sample(x: Tensor) -> int:
    values = x.view(-1)[:: max(1, x.numel() // SAMPLE)]
    integer = {2: torch.int16, 4: torch.int32}.get(x.element_size())
    return int(values.view(integer).sum()) if integer is not None else 0


def place_of(block: Block, shelf: Shelf, device: torch.device, debug: bool) -> Place:
    """A block's place, of the kind that it needs."""
    return (CodedPlace if block.forms else Place)(block, shelf, device, debug)
