"""``Block``: a module whose parameters are streamed, and where they are; ``Updates``: an optimizer to the streamer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .kernels.weights import WeightForm, empty
from .layer import Layer, gradient_dtype


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
        forms: of those whose weights cross the link in few bits, how they are written.
        bare: whether these rest in few bits alone.

    Attributes:
        layer: how these lie in one slab.
        coded_layer: how they lie in one where some have a form: codes and scales of these. None where none has.
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
    forms: Mapping[nn.Parameter, WeightForm] = field(default_factory=dict)
    bare: bool = False
    number: int = -1
    layer: Layer = field(init=False)
    coded_layer: Layer | None = field(init=False)
    trained: tuple[nn.Parameter, ...] = field(init=False)
    gradient_layer: Layer | None = field(init=False)
    backward: bool = field(default=False, init=False)
    to_come: int = field(default=0, init=False)
    kept: bool = field(default=False, init=False)
    under_way: bool = field(default=False, init=False)
    in_parts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.layer = Layer.of([(name, p.data) for name, p in self.params])
        self.coded_layer = Layer.of(list(self._coded())) if self.forms else None
        self.trained = tuple(p for _, p in self.params if p.requires_grad)
        shapes = [torch.empty(p.shape, dtype=gradient_dtype(p), device="meta") for p in self.trained]
        gradients = [(str(i), shape) for i, shape in enumerate(shapes)]
        self.gradient_layer = Layer.of(gradients) if gradients else None

    def _coded(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.params:
            form = self.forms.get(p)
            if form is None:
                yield name, p.data
            else:
                yield from zip((name, f"{name}_scale"), empty(tuple(p.shape), form, "meta"), strict=True)

    def nbytes_of(self, p: Tensor) -> int:
        """Bytes that a parameter takes where it rests."""
        form = self.forms.get(p) if self.bare and isinstance(p, nn.Parameter) else None
        return p.nbytes if form is None else form.nbytes(tuple(p.shape))

    @property
    def copied_bytes(self) -> int:
        """Bytes of host memory that what crosses the link takes beside the weights."""
        return 0 if self.bare or self.coded_layer is None else self.coded_layer.nbytes

    @property
    def largest_passing(self) -> int:
        """Bytes of the device that its weights take at most while it passes through."""
        return self.layer.nbytes + (0 if self.coded_layer is None else self.coded_layer.nbytes)


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


class Whole:
    """A forward of a block in parts, of which its own hooks may see each one."""

    def __init__(self, streamer: Any, block: Block) -> None:
        self._streamer, self._block = streamer, block

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        changed = self._streamer._before_forward(self._block, args, kwargs)
        self._block.in_parts = True
        return (args, kwargs) if changed is None else changed

    def end(self, out: Any) -> None:
        self._block.in_parts = False
        self._streamer._after_forward(self._block, out)
