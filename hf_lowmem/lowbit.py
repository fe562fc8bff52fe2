"""Has the layers of a model compute in integers, and their own way again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .config import LowMemConfig
from .experts import Experts, expert_parameters
from .integers import LEAST, How, Int8Conv1D, Int8Linear, Rounding, engine_of
from .kernels import int8

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Int8Linear, Conv1D: Int8Conv1D}


def quantize(model: nn.Module, compute: str = "int8", grad_weight: str = "int8") -> list[str]:
    """Has a model's linear layers compute their products in integers, from now on.

    These are ``nn.Linear``, GPT-2's ``Conv1D``, and experts whose weights are one parameter of three dimensions. Left
    alone are the output head and whatever shares a weight with an embedding, layers of fewer than 64 inputs or outputs
    (adapters, routers), and classes derived from ``nn.Linear``.

    Args:
        model: any model, also one that is streamed. Its parameters stay as they are, and so does what is saved.
        compute: ``"int8"``.
        grad_weight: the product that makes weight gradients: ``"int8"``, or ``"model"`` for the tokens' own dtype.

    Returns: the names of the layers, and of experts' parameters.

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
    layers = 0
    for name, module in model.named_modules():
        experts = expert_parameters(module)
        if experts:
            hows = {p: How(rounding, layers + i, grad_weight) for i, p in enumerate(experts)}
            Experts(rounding, hows).install(module)
            names += [f"{name}.{p}" for p in experts]
            layers += len(experts)
            continue
        swapped = _CLASSES.get(type(module))
        weight = getattr(module, "weight", None)
        if swapped is None or not isinstance(weight, Tensor) or weight in kept or min(weight.shape) < LEAST:
            continue
        module.__class__ = swapped
        vars(module)["lowbit"] = How(rounding, layers, grad_weight, by_input=swapped is Int8Conv1D)
        names.append(name)
        layers += 1
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that could compute in integers: none of {LEAST} inputs and "
            "outputs or more that is a plain nn.Linear or Conv1D"
        )
    return names


def use_compute(model: nn.Module, config: LowMemConfig, device: torch.device) -> None:
    """Has a model compute as ``config.compute`` says. One whose layers compute in integers goes on so."""
    if chosen_compute(config, device) != "model" and rounding_of(model) is None:
        quantize(model, "int8", config.grad_weight)


def chosen_compute(config: LowMemConfig, device: torch.device) -> str:
    """``"model"`` or ``"int8"``; ``"auto"`` is ``"int8"`` where that is fast: on GPUs since Ampere, by Triton."""
    if config.compute != "auto":
        return config.compute
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "model"
    return "model" if engine_of(device) is int8 else "int8"


def dequantize(model: nn.Module) -> None:
    """Undoes ``quantize``."""
    for module in model.modules():
        if isinstance(vars(module).get("lowbit"), Experts):
            Experts.remove(module)
        plain = next((one for one, other in _CLASSES.items() if type(module) is other), None)
        if plain is not None:
            module.__class__ = plain
            del vars(module)["lowbit"]


def rounding_of(model: nn.Module) -> Rounding | None:
    """The random bits of a quantized model, or of one within it."""
    return next((vars(m)["lowbit"].rounding for m in model.modules() if "lowbit" in vars(m)), None)
