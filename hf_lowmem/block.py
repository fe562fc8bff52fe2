"""``Block``: a module whose parameters are streamed, and where they are; ``Updates``: an optimizer to the streamer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .layer import Layer, gradient_dtype
from .link import Slot
from .shelf import Shelf


class Updates(Protocol):
    """An optimizer that goes on after its step, block by block; see ``LowBitAdamW.defer``."""

    def wait(self, number: int) -> None: ...
    def take(
        self, number: int, weights: Mapping[Tensor, Tensor], grads: Mapping[Tensor, Tensor], seconds: float
    ) -> Any: ...
    def done(self, number: int) -> bool: ...
    def synchronize(self) -> None: ...
    def update(
        self, number: int, grads: Mapping[Tensor, Tensor], arrived: Callable[[], None], used: Callable[[], None]
    ) -> None: ...


@dataclass(eq=False)
class Block:
    """A module whose parameters are streamed.

    Args:
        name: its name within the model.
        module: the module.
        params: (name within the module, parameter) of what is streamed of it.

    Attributes:
        layer: how these lie in one slab.
        trained: those that are trained.
        gradient_layer: how their gradients lie in one slab; None if there are none.
        backward: whether it is in the state BACKWARD.
        to_come: forwards whose backward is still to come.
        kept: whether it stays on the device for the time being, and is not streamed.
        under_way: whether its forward has begun and not ended.
        in_parts: whether a forward is under way that calls the module for each part of its batch.
    """

    name: str
    module: nn.Module
    params: Sequence[tuple[str, nn.Parameter]]
    number: int = -1
    layer: Layer = field(init=False)
    trained: tuple[nn.Parameter, ...] = field(init=False)
    gradient_layer: Layer | None = field(init=False)
    backward: bool = field(default=False, init=False)
    to_come: int = field(default=0, init=False)
    kept: bool = field(default=False, init=False)
    under_way: bool = field(default=False, init=False)
    in_parts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.layer = Layer.of([(name, p.data) for name, p in self.params])
        self.trained = tuple(p for _, p in self.params if p.requires_grad)
        shapes = [torch.empty(p.shape, dtype=gradient_dtype(p), device="meta") for p in self.trained]
        gradients = [(str(i), shape) for i, shape in enumerate(shapes)]
        self.gradient_layer = Layer.of(gradients) if gradients else None


class AfterBackward(torch.autograd.Function):
    """The identity on a block's input. Its backward runs when the block's own is over."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], tensor: Tensor) -> Tensor:
        ctx.done = done
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.done()
        return None, gradient


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
        self.home = block.layer.views(shelf.weights(block.number))
        for (_, p), view in zip(block.params, self.home, strict=True):
            if p.data_ptr() != view.data_ptr():  # not loaded into its place
                view.copy_(p.data)
            p.data = view
        self.weights = Copy(block.layer, device, debug)
        self.gradients = None if block.gradient_layer is None else Copy(block.gradient_layer, device, debug)
        self.gradient_home: list[Tensor] = []  # views of the shelf's place, once it has been taken
        self.bound = False
        self._params = [p for _, p in block.params]
        self._round, self._versions = -1, [0]

    def is_for(self, number: int) -> None:
        """Says for which round the copy of the weights has been fetched just now."""
        self._round, self._versions = number, [p._version for p in self._params]

    def is_of(self, number: int) -> bool:
        """Whether the copy of the weights is for this round, and nobody has written them since through torch."""
        return self._round == number and self._versions == [p._version for p in self._params]
