"""Linear layers whose products run in 8-bit or 4-bit integers, forward and backward. Their weights stay what they are.

    output      = q(x R) @ q(w R).T   a scale for each token and each output; R: a rotation of the inputs
    grad_input  = q(g * s) @ codes    codes and s: those of w's rows, as they lie
    grad_weight = q(g).T @ q(x)       a scale for each output and each input; or in the tokens' own dtype

In 4 bits (``Linear4``) the gradient of the input is that of the rotated codes, rotated back, of a gradient in 8 bits
whose halves are multiplied one after the other; the gradient of the weight has 8 bits:

    output      = q4(x R) @ q4(w R).T
    grad_input  = q8(g * s) @ codes @ R.T   codes and s: those of w R
    grad_weight = as above

Inputs and weights are rounded to nearest, gradients stochastically: a gradient's mean is then what it would be with
the rounded inputs and weights, and errors do not add up over the steps. Weights are rounded anew in each pass, so
nothing has to be told that an optimizer, or a streamer, has changed them. Layers that read the same tensor share its
codes.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from . import codec
from .engines import proven
from .kernels import cuda_int4, int4, int8
from .kernels.int4 import Rows4
from .kernels.int8 import Rows

FEW = 16  # tokens up to which a layer that is not trained computes as it did: to read its weight once is all the work
LEAST = 64  # inputs or outputs of a layer under which integers cost more than they bring: adapters, routers
_SALT = 0xBB67AE8584CAA73B  # so that the optimizer's noise, of the same seed and step, is another
_BACKWARDS = 1 << 32  # keys of one step


NO_TRITON = (
    "Triton cannot be used for integer products ({reason}): torch's own are, which are slower. Install triton (on "
    "Windows triton-windows) and a C compiler."
)
NO_INT4 = (
    "4-bit products cannot be compiled for this GPU ({reason}): torch's 8-bit ones compute the same, and bring "
    'nothing. compute="int8" is faster then.'
)


# -- who computes -------------------------------------------------------------------------------------------------
@functools.cache
def engine_of(device: torch.device) -> ModuleType:
    """What computes on a device: ``kernels.triton_int8`` on a GPU where its bits are right, else ``kernels.int8``."""
    if device.type != "cuda":
        return int8

    def load() -> ModuleType:
        from .kernels import triton_int8

        return triton_int8

    return proven(load, lambda engine: goes_wrong(engine, device), int8, NO_TRITON)


def goes_wrong(engine: ModuleType, device: torch.device) -> str | None:
    """What an engine computes differently on a device from the reference; None if nothing."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(rows, 200, generator=generator).bfloat16() for rows in (37, 48))
    results = []
    for module, place in ((engine, device), (int8, torch.device("cpu"))):
        tokens, weight = x.to(place), w.to(place)
        rows, columns = module.quantize_both(tokens, torch.linspace(0.5, 2, 200).to(place), 5)
        rotated, scale = module.rotated_rows(weight)
        turned = module.turned_codes(weight, scale)
        out = module.product(rows, rotated, torch.float32)
        found = (rows.codes, rows.scale, columns.codes, columns.scale, rotated.codes, rotated.scale, scale, turned, out)
        results.append([one.cpu() for one in found])
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return None if same else "it computes other bits than it should: please report this"


@functools.cache
def engine4_of(device: torch.device) -> ModuleType:
    """The same for 4 bits: ``kernels.cuda_int4`` where its bits are right, else ``kernels.int4``.

    Raises: see ``check_device4``.
    """
    check_device4(device)
    if device.type != "cuda":
        return int4
    return proven(lambda: cuda_int4, lambda engine: goes_wrong4(engine, device), int4, NO_INT4)


def check_device4(device: torch.device) -> None:
    """Raises: ValueError for a GPU whose tensor cores do not multiply 4-bit integers."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if not cuda_int4.able(capability):
        first, last = (".".join(map(str, one)) for one in (cuda_int4.FIRST, cuda_int4.LAST))
        raise ValueError(
            f'compute="int4" needs tensor cores that multiply 4-bit integers: GPUs of compute capability {first} to '
            f"{last}. {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}, where that is "
            'missing, or emulated and slow: write compute="int8", or "auto"'
        )


def goes_wrong4(engine: ModuleType, device: torch.device) -> str | None:
    """What an engine of 4 bits computes differently on a device from the reference; None if nothing."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(rows, 208, generator=generator).bfloat16() for rows in (37, 150))
    results = []
    for module, place in ((engine, device), (int4, torch.device("cpu"))):
        tokens, weight = x.to(place), w.to(place)
        (rows, _), (codes, scale) = module.rotated_rows(tokens), module.rotated_rows(weight)
        out = module.product(rows, codes, torch.bfloat16, torch.linspace(-1, 1, 150).to(place))
        gradient, turned = module.split_rows(out, scale, 5), module.turned_rows(weight)
        back = module.rotated_back(module.product(gradient, turned, torch.float32))
        found = (rows.codes, rows.scale, codes.codes, scale, out, gradient.codes, gradient.scale, turned.codes, back)
        results.append([one.cpu() for one in found])
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return None if same else "it computes other bits than it should: please report this"


# -- what a model's layers share ------------------------------------------------------------------------------------
class Columns:
    """The columns of one tensor in 8 bits, found by the first layer that needs them and kept until the last."""

    def __init__(self) -> None:
        self.readers = 0  # layers whose backward will ask
        self._found: Rows | None = None
        self._left = 0

    def of(self, tokens: Tensor, engine: ModuleType) -> Rows:
        if self._found is None:
            self._found, self._left = engine.quantize_columns(tokens), self.readers
        found, self._left = self._found, self._left - 1
        if self._left <= 0:
            self._found = None
        return found  # type: ignore[no-any-return]


@dataclass
class Tokens:
    """A layer's input."""

    reference: weakref.ref[Tensor]
    version: int
    engine: ModuleType
    rows: Rows | Rows4
    columns: Columns


class Rounding:
    """What the layers of a model have in common: their random bits, and the input that was read last.

    Attributes:
        seed: of all of them.
        step: number of the optimizer step; with the seed it decides all random bits. None: nobody counts them, and
            every backward of a layer has its own.
        layers: number of the layers, each of which has a number.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.step: int | None = None
        self.layers = 0  # so many have it
        self._counts: dict[int, tuple[int | None, int]] = {}  # by layer: the step, and its backwards so far
        self._latest: Tokens | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_latest": None}

    def backwards(self) -> dict[int, tuple[int | None, int]]:
        """How far each layer is: ``go_back`` takes it, for what is done again."""
        return dict(self._counts)

    def go_back(self, backwards: dict[int, tuple[int | None, int]]) -> None:
        self._counts = dict(backwards)

    def key(self, layer: int) -> int:
        """The key of a layer's next backward."""
        step, count = self._counts.get(layer, (None, 0))
        count = count + 1 if step == self.step else 0
        self._counts[layer] = self.step, count
        return codec.tensor_key(self.seed ^ _SALT, (self.step or 0) * _BACKWARDS + count, layer)

    def tokens(self, x: Tensor, engine: ModuleType) -> Tokens:
        """An input in an engine's bits: again what the layer before has found, if it has read the same tensor.

        Only of what has a graph: a buffer that is filled anew may not count its writes.
        """
        latest = self._latest
        version = -1 if x.grad_fn is None else x._version
        known = latest is not None and latest.reference() is x and latest.engine is engine
        if latest is not None and known and latest.version == version != -1:
            return latest
        rows, _ = engine.rotated_rows(x.reshape(-1, x.shape[-1]))
        found = Tokens(weakref.ref(x, self._forget), version, engine, rows, Columns())
        if version != -1:
            self._latest = found
        return found

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        if self._latest is not None and self._latest.reference is reference:
            self._latest = None


# -- layers -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class How:
    """Of one layer.

    Args:
        rounding: the model's.
        layer: its number.
        grad_weight: ``"int8"``, or ``"model"`` for the tokens' own dtype.
        by_input: whether the weight is ``[inputs, outputs]``, as in ``Conv1D``.
        bits: 8, or 4.
    """

    rounding: Rounding
    layer: int
    grad_weight: str
    by_input: bool = False
    bits: int = 8


class Linear8(torch.autograd.Function):
    """``x @ w.T + bias`` with products in integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How, tokens: Tokens) -> Tensor:
        engine = engine_of(x.device)
        rows, scale = engine.rotated_rows(weight.t().contiguous() if how.by_input else weight)
        out: Tensor = engine.product(tokens.rows, rows, x.dtype, bias)
        trained = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if trained else None, weight if ctx.needs_input_grad[0] else None, scale)
        tokens.columns.readers += trained
        ctx.how, ctx.shape, ctx.dtype, ctx.columns = how, x.shape, weight.dtype, tokens.columns
        ctx.bias = None if bias is None else bias.dtype
        return out  # of two dimensions: a view that is made in here may not be written by others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        how, g = ctx.how, gradient.reshape(-1, gradient.shape[-1])
        key, engine = how.rounding.key(how.layer), engine_of(gradient.device)
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        by_columns = of_weight and how.grad_weight == "int8"
        by_row = by_column = None
        if of_input and by_columns:
            by_row, by_column = engine.quantize_both(g, scale, key)
        elif of_input:
            by_row = engine.quantize_rows(g, scale, key)
        elif by_columns:
            by_column = engine.quantize_columns(g, key)
        grads: list[Tensor | None] = [None, None, None]
        if of_input:
            turned = engine.turned_codes(weight.t() if how.by_input else weight, scale)
            grads[0] = engine.product(by_row, Rows(turned, None), g.dtype).view(ctx.shape)
        if of_weight:
            grads[1] = weight_gradient(ctx, g, x.reshape(-1, x.shape[-1]), by_column)
        if of_bias:
            grads[2] = g.sum(0).to(ctx.bias)
        return *grads, None, None


class Linear4(torch.autograd.Function):
    """The same in 4 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How, tokens: Tokens) -> Tensor:
        engine = engine4_of(x.device)
        rows, scale = engine.rotated_rows(weight.t() if how.by_input else weight)
        out: Tensor = engine.product(tokens.rows, rows, x.dtype, bias)
        trained = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if trained else None, weight if ctx.needs_input_grad[0] else None, scale)
        tokens.columns.readers += trained
        ctx.how, ctx.shape, ctx.dtype, ctx.columns = how, x.shape, weight.dtype, tokens.columns
        ctx.bias = None if bias is None else bias.dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        how, g = ctx.how, gradient.reshape(-1, gradient.shape[-1])
        key, engine = how.rounding.key(how.layer), engine4_of(gradient.device)
        grads: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            turned = engine.turned_rows(weight.t() if how.by_input else weight)
            of_codes = engine.product(engine.split_rows(g, scale, key), turned, g.dtype)
            grads[0] = engine.rotated_back(of_codes).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            by_column = None
            if how.grad_weight == "int8":
                by_column = engine_of(g.device).quantize_columns(g, key)
            grads[1] = weight_gradient(ctx, g, x.reshape(-1, x.shape[-1]), by_column)
        if ctx.needs_input_grad[2]:
            grads[2] = g.sum(0).to(ctx.bias)
        return *grads, None, None


def weight_gradient(ctx: Any, g: Tensor, tokens: Tensor, by_column: Rows | None) -> Tensor:
    """Of a layer, from its gradient in 8 bits, or in the tokens' own dtype."""
    if by_column is None:
        return (tokens.t() @ g if ctx.how.by_input else g.t() @ tokens).to(ctx.dtype)
    engine = engine_of(g.device)
    pair = by_column, ctx.columns.of(tokens, engine)
    return engine.product(*(pair[::-1] if ctx.how.by_input else pair), ctx.dtype)  # type: ignore[no-any-return]


@torch.compiler.disable
def apply_layer(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return applied(x, weight, bias, how)
    return applied(x, weight, bias, how)


def applied(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    inputs, outputs = weight.shape if how.by_input else weight.shape[::-1]
    if x.shape[-1] != inputs:
        raise RuntimeError(
            f"a layer of {inputs} inputs was given {tuple(x.shape)}, whose last dimension should be {inputs}"
        )
    engine, function = (engine_of, Linear8) if how.bits == 8 else (engine4_of, Linear4)
    tokens = how.rounding.tokens(x, engine(x.device))
    out: Tensor = function.apply(x, weight, bias, how, tokens)
    return out.view(*x.shape[:-1], outputs)


def few(module: nn.Module, x: Tensor) -> bool:
    """Whether a layer generates text, a token at a time."""
    return not module.training and not torch.is_grad_enabled() and x.numel() <= FEW * x.shape[-1]


class Int8Linear(nn.Linear):
    """The class that an ``nn.Linear`` has while its products run in integers. It is one in all other respects."""

    lowbit: How

    def forward(self, input: Tensor) -> Tensor:
        """See ``nn.Linear``."""
        if "lowbit" not in vars(self) or few(self, input):
            return nn.Linear.forward(self, input)
        return apply_layer(input, self.weight, self.bias, self.lowbit)


class Int8Conv1D(Conv1D):
    """The same for GPT-2's ``Conv1D``, whose weight is ``[inputs, outputs]``."""

    lowbit: How

    def forward(self, x: Tensor) -> Tensor:
        """See ``Conv1D``."""
        if "lowbit" not in vars(self) or few(self, x):
            return Conv1D.forward(self, x)  # type: ignore[no-any-return]
        return apply_layer(x, self.weight, self.bias, self.lowbit)


def use_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives a module another class of the same layout, also where accelerate keeps its forward beside its own."""
    module.__class__ = cls
    if isinstance(vars(module).get("_old_forward"), MethodType):
        vars(module)["_old_forward"] = MethodType(cls.forward, module)
