"""``Place``: where a block's tensors are, at home and on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .block import Block
from .layer import Layer
from .link import Link, Slot
from .shelf import Shelf


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
        self.home = self._moved_in()
        for (_, p), view in zip(block.params, self.home, strict=True):
            p.data = view
        self.weights = Copy(block.layer, device, debug)
        self.gradients = None if block.gradient_layer is None else Copy(block.gradient_layer, device, debug)
        self.gradient_home: list[Tensor] = []  # views of the shelf's place, once it has been taken
        self.bound = False
        self._round, self._versions = -1, [0]

    def _moved_in(self) -> list[Tensor]:
        """Brings the weights to the shelf. Returns: what the parameters are there."""
        home = self.block.layer.views(self.shelf.weights(self.block.number))
        for (_, p), view in zip(self.block.params, home, strict=True):
            if p.data_ptr() != view.data_ptr():  # not loaded into its place
                view.copy_(p.data)
        return home

    def on_device(self, device: torch.device) -> list[Tensor]:
        """Copies the weights to a device, of a block that is about to stay there. Returns: what the parameters are."""
        return [p.data.to(device, copy=True) for _, p in self.block.params]

    def on_shelf(self) -> list[Tensor]:
        """Copies the weights of a block that was on the device to the shelf. Returns: what the parameters are."""
        return self._moved_in()

    def is_for(self, number: int) -> None:
        """Says for which round the copy of the weights has been fetched just now."""
        self._round, self._versions = number, self._now()

    def is_of(self, number: int) -> bool:
        """Whether the copy of the weights is for this round, and nobody has written them since through torch."""
        return self._round == number and self._versions == self._now()

    def _now(self) -> list[int]:
        return [p._version for _, p in self.block.params]

    def hooks(self) -> Iterable[RemovableHandle]:
        """Hooks on its modules that it needs."""
        return ()

    def leave(self) -> None:
        """Has the parameters, which are at home, be tensors that need no place."""

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

    def take_in(self) -> None:
        """Brings home what others have laid elsewhere, by assigning to ``data``."""
        for (_, p), home in zip(self.block.params, self.home, strict=True):
            if p.data_ptr() != home.data_ptr() and not self.bound:
                home.copy_(p.data)
                p.data = home

    def fetch(self, link: Link) -> None:
        """Starts the weights on their way."""
        self.take_in()
        self.weights.ticket = link.fetch(self.weights.slot, self.shelf.weights(self.block.number))
        self.weights.there = True

    def fetch_updated(self, link: Link, luggage: Any) -> None:
        """The same with what the optimizer has not done yet, which is done on the device; see ``Luggage``."""
        views = {p: view for (_, p), view in zip(self.block.params, self.weights.views, strict=True)}
        self.weights.ticket = luggage.travel(link, self.weights.slot, self.shelf.weights(self.block.number), views)
        self.weights.there = True

    @property
    def link_bytes(self) -> int:
        """About what crosses the link before such an update is done, but for the gradients."""
        return self.block.layer.nbytes  # the states are about as large as the weights, and come behind them

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
