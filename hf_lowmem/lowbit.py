"""Linear layers whose products run in 8-bit integers, forward and backward. Their weights stay what they are.

    output      = q(x) @ q(w).T          a scale for each token and each output
    grad_input  = q(g * s) @ codes of w   s: the scales of w's rows, so that the same codes serve both ways
    grad_weight = g.T @ x                in the tokens' own dtype, or q(g.T) @ q(x.T).T

Inputs and weights are rounded to nearest, gradients stochastically: a gradient's mean is then what it would be with
the rounded weights, and errors do not add up over the steps. Weights are rounded anew in each pass, so nothing has to
be told that an optimizer, or a streamer, has changed them.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from . import codec
from .kernels import int8
from .kernels.int8 import Rows

LEAST = 64  # inputs or outputs of a layer under which integers cost more than they bring: adapters, routers
_SALT = 0xBB67AE8584CAA73B  # so that the optimizer's noise, of the same seed and step, is another
_BACKWARDS = 1 << 32  # keys of one step


# -- who computes -------------------------------------------------------------------------------------------------
@functools.cache
def engine_of(device: torch.device) -> ModuleType:
    """What computes on a device: ``kernels.triton_int8`` on a GPU where its bits are right, else ``kernels.int8``."""
    if device.type != "cuda":
        return int8
    try:
        from .kernels import triton_int8

        reason = goes_wrong(triton_int8, device)
    except Exception as error:  # no Triton, no C compiler, a GPU that it does not know
        reason = f"{type(error).__name__}: {error}"
    if reason is None:
        return triton_int8
    warnings.warn(
        f"Triton cannot be used for integer products ({reason}): torch's own are, which are slower. Install triton (on "
        "Windows triton-windows) and a C compiler.",
        RuntimeWarning,
        stacklevel=2,
    )
    return int8


def goes_wrong(engine: ModuleType, device: torch.device) -> str | None:
    """What an engine computes differently on a device from the reference; None if nothing."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(rows, 200, generator=generator).bfloat16() for rows in (37, 50))
    for key in (None, 5):
        pairs = [(engine.quantize_rows(m.to(device), None, key), int8.quantize_rows(m, None, key)) for m in (x, w)]
        both: list[tuple[Any, Any]] = [(a.codes, b.codes) for a, b in pairs] + [(a.scale, b.scale) for a, b in pairs]
        same = all(torch.equal(one.cpu(), two) for one, two in both)
        (a, b), (c, d) = pairs
        found = engine.product(a, c, torch.float32).cpu()
        if not same or not torch.equal(found, int8.product(b, d, torch.float32)):
            return "it computes other bits than it should: please report this"
    return None


# -- random bits --------------------------------------------------------------------------------------------------
class Rounding:
    """The random bits of a model's layers.

    Attributes:
        seed: of all of them.
        step: number of the optimizer step; with the seed it decides all random bits. None: nobody counts them, and
            every backward of a layer has its own.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.step: int | None = None
        self._counts: dict[int, tuple[int | None, int]] = {}  # by layer: the step, and its backwards so far

    def key(self, layer: int) -> int:
        """The key of a layer's next backward."""
        step, count = self._counts.get(layer, (None, 0))
        count = count + 1 if step == self.step else 0
        self._counts[layer] = self.step, count
        return codec.tensor_key(self.seed ^ _SALT, (self.step or 0) * _BACKWARDS + count, layer)


# -- layers -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _How:
    """Of one layer.

    Args:
        rounding: the model's.
        layer: its number.
        grad_weight: ``"int8"``, or ``"model"`` for the tokens' own dtype.
        by_input: whether the weight is ``[inputs, outputs]``, as in ``Conv1D``.
    """

    rounding: Rounding
    layer: int
    grad_weight: str
    by_input: bool = False


class _Linear8(torch.autograd.Function):
    """``x @ w.T + bias`` with products in integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        engine = engine_of(x.device)
        rows = engine.quantize_rows(weight.t() if how.by_input else weight)
        out = engine.product(engine.quantize_rows(x.reshape(-1, x.shape[-1])), rows, x.dtype, bias)
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.how, ctx.shape, ctx.bias = how, x.shape, None if bias is None else bias.dtype
        return out.view(*x.shape[:-1], len(rows.codes))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        how, g = ctx.how, gradient.reshape(-1, gradient.shape[-1])
        key, engine = how.rounding.key(how.layer), engine_of(gradient.device)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            rows = engine.quantize_rows(weight.t() if how.by_input else weight)
            grads = engine.quantize_rows(g, rows.scale, codec.mix64(key ^ 1))
            of_x = engine.product(grads, Rows(rows.codes.t().contiguous(), None), g.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            tokens = x.reshape(-1, x.shape[-1])
            a, b = (tokens, g) if how.by_input else (g, tokens)
            if how.grad_weight == "int8":
                keys = (None, codec.mix64(key ^ 2)) if how.by_input else (codec.mix64(key ^ 2), None)
                of_weight = engine.product(
                    engine.quantize_rows(a.t(), key=keys[0]), engine.quantize_rows(b.t(), key=keys[1]), weight.dtype
                )
            else:
                of_weight = (a.t() @ b).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = g.sum(0).to(ctx.bias)
        return of_x, of_weight, of_bias, None


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            out: Tensor = _Linear8.apply(x, weight, bias, how)
            return out
    return _Linear8.apply(x, weight, bias, how)  # type: ignore[no-any-return]


class Int8Linear(nn.Linear):
    """The class that an ``nn.Linear`` has while its products run in integers. It is one in all other respects."""

    lowbit: _How

    def forward(self, input: Tensor) -> Tensor:
        """See ``nn.Linear``."""
        return _apply(input, self.weight, self.bias, self.lowbit)


class Int8Conv1D(Conv1D):
    """The same for GPT-2's ``Conv1D``, whose weight is ``[inputs, outputs]``."""

    lowbit: _How

    def forward(self, x: Tensor) -> Tensor:
        """See ``Conv1D``."""
        return _apply(x, self.weight, self.bias, self.lowbit)


# -- on a model ---------------------------------------------------------------------------------------------------
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Int8Linear, Conv1D: Int8Conv1D}


def quantize(model: nn.Module, compute: str = "int8", grad_weight: str = "model") -> list[str]:
    """Has a model's linear layers compute their products in integers, from now on.

    Left alone are the output head and whatever shares a weight with an embedding, layers of fewer than 64 inputs or
    outputs (adapters, routers), and classes derived from ``nn.Linear``.

    Args:
        model: any model, also one that is streamed. Its parameters stay as they are, and so does what is saved.
        compute: ``"int8"``.
        grad_weight: the product that makes weight gradients: ``"model"`` for the tokens' own dtype, or ``"int8"``.

    Returns: the names of the layers.

    Raises: ValueError for another format, or where no layer is one of these.
    """
    if compute != "int8":
        raise ValueError(f'compute={compute!r} is none that layers can compute in: write "int8"')
    if grad_weight not in ("model", "int8"):
        raise ValueError(f'grad_weight={grad_weight!r} is neither "model" nor "int8"')
    kept = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for owner in model.modules():
        find: Any = getattr(owner, "get_output_embeddings", None)
        weight = getattr(find(), "weight", None) if find is not None else None
        kept |= {weight} if isinstance(weight, nn.Parameter) else set()
    rounding = Rounding()
    names: list[str] = []
    for name, module in model.named_modules():
        swapped = _CLASSES.get(type(module))
        weight = getattr(module, "weight", None)
        if swapped is None or not isinstance(weight, Tensor) or weight in kept or min(weight.shape) < LEAST:
            continue
        module.__class__ = swapped
        vars(module)["lowbit"] = _How(rounding, len(names), grad_weight, by_input=swapped is Int8Conv1D)
        names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that could compute in integers: none of {LEAST} inputs and "
            "outputs or more that is a plain nn.Linear or Conv1D"
        )
    return names


def dequantize(model: nn.Module) -> None:
    """Undoes ``quantize``."""
    for module in model.modules():
        plain = next((one for one, other in _CLASSES.items() if type(module) is other), None)
        if plain is not None:
            module.__class__ = plain
            del vars(module)["lowbit"]


def rounding_of(model: nn.Module) -> Rounding | None:
    """The random bits of a quantized model, or of one within it."""
    return next((vars(m)["lowbit"].rounding for m in model.modules() if "lowbit" in vars(m)), None)
