"""Experts whose products run in 8-bit integers: parameters of three dimensions, a matrix for each expert.

How a model calls them differs: all in one grouped product, or one after another, by transformers' implementations or a
model's own loop. So nothing of that is replaced. While such a module's forward runs, the products that take its weights
are computed here instead; a ``TorchFunctionMode`` sees them.

Weight gradients are computed in the weights' own dtype where experts are grouped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .integers import LEAST, How, Rounding, apply_layer, engine_of, few, use_class

_GROUPED = [f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None]
_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


class Grouped8(torch.autograd.Function):
    """Rows group by group times the matrices of their experts, ``[experts, inputs, outputs]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, how: How) -> Tensor:
        engine, by_output = engine_of(x.device), weight.transpose(1, 2)
        count = by_output.shape[:2]
        rows, scale = engine.rotated_rows(by_output.reshape(-1, by_output.shape[2]))
        tokens, _ = engine.rotated_rows(x)
        codes = rows.codes.unflatten(0, count)
        out: Tensor = engine.grouped_product(tokens, codes, rows.scale.view(count), ends, x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, scale, ends)
        ctx.how = how
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, ends = ctx.saved_tensors
        engine, by_output = engine_of(g.device), weight.transpose(1, 2)
        key = ctx.how.rounding.key(ctx.how.layer)
        count = by_output.shape[:2]
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            number = torch.arange(len(g), dtype=ends.dtype, device=g.device)
            groups = torch.searchsorted(ends, number, right=True).clamp_(max=len(ends) - 1)
            grads = engine.quantize_rows(g, scale.view(count), key, groups)
            turned = engine.turned_codes(by_output.reshape(-1, by_output.shape[2]), scale)
            codes = turned.unflatten(1, count).permute(1, 0, 2)
            of_input = engine.grouped_product(grads, codes, None, ends, g.dtype)
        if ctx.needs_input_grad[1]:
            lies_by_output = weight.stride(1) == 1
            one, other = (g, x) if lies_by_output else (x, g)
            of_weight = outer_products(one, other, ends, weight.dtype)
            of_weight = of_weight.transpose(1, 2) if lies_by_output else of_weight
        return of_input, of_weight, None, None


def outer_products(a: Tensor, b: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """``a.T @ b`` of each group of rows, ``[groups, columns of a, columns of b]``."""
    on_gpu = a.is_cuda and torch.cuda.get_device_capability(a.device) >= (8, 0)
    if on_gpu and _GROUPED and a.dtype is b.dtype is torch.bfloat16:
        return _GROUPED[0](a.t(), b, offs=ends).to(dtype)  # type: ignore[no-any-return]
    out = a.new_zeros(len(ends), a.shape[1], b.shape[1], dtype=dtype)
    start = 0
    for group, end in enumerate(ends.tolist()):
        out[group] = a[start:end].t() @ b[start:end]
        start = end
    return out


# -- where their products are seen --------------------------------------------------------------------------------
class _InIntegers(TorchFunctionMode):
    """Computes products with some parameters, or views of them, in integers.

    Args:
        hows: by the parameter's id.
    """

    def __init__(self, hows: dict[int, How]) -> None:
        super().__init__()
        self._hows = hows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self._product(func, args, kwargs)
        return func(*args, **kwargs) if out is None else out

    def _product(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        grouped = func in _GROUPED or str(func) == "transformers.grouped_mm_fallback"
        if not grouped and func not in _MATMULS and func is not F.linear:
            return None
        how = self._how(args[1]) if len(args) > 1 else None
        if how is None:
            return None
        x, weight = args[:2]
        if grouped:
            ends = args[2] if len(args) > 2 else kwargs.get("offs")
            return Grouped8.apply(x, weight, ends.to(torch.int32), how)  # type: ignore[no-any-return, union-attr]
        autocast = torch.is_autocast_enabled(x.device.type)
        if weight.dim() != 2 or (x.dtype is not weight.dtype and not autocast):
            return None
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        by_input = func is not F.linear
        return apply_layer(x, weight, bias, How(how.rounding, how.layer, how.grad_weight, by_input))

    def _how(self, weight: Any) -> How | None:
        if not isinstance(weight, Tensor):
            return None
        found = self._hows.get(id(weight))
        if found is None and not weight.is_inference() and weight._is_view():
            found = self._hows.get(id(weight._base))
        return found


class WithExperts:
    """What a class that has experts is derived from besides, while these compute in integers."""

    stock: type[nn.Module]


@dataclass(frozen=True)
class Experts:
    """Of a module of experts.

    Args:
        rounding: the model's.
        hows: by the parameter's name.
    """

    rounding: Rounding
    hows: dict[str, How]


@functools.cache
def derived(stock: type[nn.Module]) -> type[nn.Module]:
    """The class that a module of experts has while they compute in integers."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        experts = vars(self).get("lowbit")
        if experts is None or (args and isinstance(args[0], Tensor) and few(self, args[0])):
            return stock.forward(self, *args, **kwargs)
        with _InIntegers({id(getattr(self, name)): how for name, how in experts.hows.items()}):
            return stock.forward(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # a class that is made at run time is in no file
        return _remade, (stock,), vars(self)

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "stock": stock, "__module__": __name__}
    return type(f"Int8{stock.__name__}", (stock, WithExperts), members)


def _remade(stock: type[nn.Module]) -> nn.Module:
    cls = derived(stock)  # type: ignore[arg-type]
    return cls.__new__(cls)


def install(module: nn.Module, hows: dict[str, How]) -> None:
    """Has a module's experts compute in integers.

    Args:
        hows: by the parameter's name.
    """
    use_class(module, derived(type(module)))  # type: ignore[arg-type]
    vars(module)["lowbit"] = Experts(next(iter(hows.values())).rounding, hows)


def expert_parameters(module: nn.Module) -> list[str]:
    """The names of a module's own parameters of three dimensions whose matrices are large enough."""
    if isinstance(module, nn.modules.conv._ConvNd | nn.Bilinear):
        return []
    own = module.named_parameters(recurse=False)
    matrices = [(name, p) for name, p in own if p.dim() == 3 and p.is_floating_point()]
    return [name for name, p in matrices if len(p) > 1 and min(p.shape[1:]) >= LEAST]
