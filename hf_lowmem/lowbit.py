"""Has the layers of a model compute in integers, and their own way again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .config import LowMemConfig
from .experts import WithExperts, expert_parameters, install
from .integers import LEAST, How, Int8Conv1D, Int8Linear, Rounding, check_device4, engine_of, use_class
from .kernels import int8

HEADS = {"lm_head", "score", "classifier", "qa_outputs"}  # of which not all are output embeddings
BITS = {"int8": 8, "int4": 4}
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Int8Linear, Conv1D: Int8Conv1D}


def quantize(model: nn.Module, compute: str = "int8", grad_weight: str = "int8") -> list[str]:
    """Has a model's linear layers compute their products in integers, from now on.

    These are ``nn.Linear``, GPT-2's ``Conv1D``, and experts whose weights are one parameter of three dimensions. Left
    alone are heads (``lm_head``, ``score``, ``classifier``, ``qa_outputs``), what shares a weight with an embedding,
    LoRA's adapters, layers of fewer than 64 inputs or outputs (routers), and classes derived from ``nn.Linear``.

    Args:
        model: any model, also one that is streamed. Its parameters stay as they are, and so does what is saved.
        compute: ``"int8"``, or ``"int4"`` for 4 bits: experts and weight gradients have 8 all the same.
        grad_weight: the product that makes weight gradients: ``"int8"``, or ``"model"`` for the tokens' own dtype.

    Returns: the names of the layers, and of experts' parameters.

    Raises: ValueError for another format, for ``"int4"`` on a GPU that cannot, or where no layer is one of these.
    """
    if compute not in BITS:
        raise ValueError(
            f'compute={compute!r} is none that layers can compute in: write "int8" or "int4", or set "auto" in a '
            "LowMemConfig"
        )
    if compute == "int4":
        for device in {p.device for p in model.parameters()}:
            check_device4(device)
    if grad_weight not in ("model", "int8"):
        raise ValueError(f'grad_weight={grad_weight!r} is neither "model" nor "int8"')
    rounding = rounding_of(model) or Rounding()
    names: list[str] = []
    for name, module, params in list(_layers(model)):
        if "lowbit" not in vars(module):
            _swap(module, params, rounding, grad_weight, BITS[compute])
            names += [f"{name}.{p}" for p in params] if isinstance(module, WithExperts) else [name]
    if not names and rounding.layers:
        raise ValueError(f"{type(model).__name__} computes in integers already: dequantize(model) undoes that")
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that could compute in integers: none of {LEAST} inputs and "
            "outputs or more that is a plain nn.Linear or Conv1D"
        )
    return names


def _is_other(name: str) -> bool:
    """Whether a module is a head or an adapter, by its name."""
    return any(part in HEADS or part.startswith("lora_") for part in name.split("."))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The layers that few bits are for, whatever they compute in now: names, modules, and their weights' names."""
    kept = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for owner in model.modules():
        find: Any = getattr(owner, "get_output_embeddings", None)
        weight = getattr(find(), "weight", None) if find is not None else None
        kept |= {weight} if isinstance(weight, nn.Parameter) else set()
    for name, module in model.named_modules():
        if _is_other(name):
            continue
        experts, weight = expert_parameters(module), getattr(module, "weight", None)
        if experts:
            yield name, module, experts
        elif (
            type(module) in (*_CLASSES, *_CLASSES.values())
            and isinstance(weight, Tensor)
            and weight not in kept
            and min(weight.shape) >= LEAST
        ):
            yield name, module, ["weight"]


def layer_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that may be written in few bits: those of the layers that ``quantize`` takes."""
    found = (getattr(module, name) for _, module, params in _layers(model) for name in params)
    return [weight for weight in found if isinstance(weight, nn.Parameter)]


def _swap(module: nn.Module, params: list[str], rounding: Rounding, grad_weight: str, bits: int) -> None:
    """Has a module compute in integers."""
    swapped = _CLASSES.get(type(module))
    if swapped is None:
        install(module, {p: How(rounding, rounding.layers + i, grad_weight) for i, p in enumerate(params)})
    else:
        use_class(module, swapped)
        vars(module)["lowbit"] = How(rounding, rounding.layers, grad_weight, swapped is Int8Conv1D, bits)
    rounding.layers += len(params)


def use_compute(model: nn.Module, config: LowMemConfig, device: torch.device) -> None:
    """Has a model compute as ``config.compute`` says. One whose layers compute in integers goes on so."""
    compute = chosen_compute(config, device)
    if compute == "int4":
        check_device4(device)  # where the model comes to
    if compute != "model" and rounding_of(model) is None:
        quantize(model, compute, config.grad_weight)


def chosen_compute(config: LowMemConfig, device: torch.device) -> str:
    """As the setting says; ``"auto"`` is ``"int8"`` where that is fast: on GPUs since Ampere, by Triton."""
    if config.compute != "auto":
        return config.compute
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "model"
    return "model" if engine_of(device) is int8 else "int8"


def caveats(config: LowMemConfig) -> list[str]:
    """What settings cost that are not as accurate as the others, by name; docs/integers.md and low-bit-weights.md."""
    found = []
    if config.compute == "int4":
        found.append(
            'compute="int4" costs accuracy: with it the loss of the pretrained SmolLM2-135M is 3.46 instead of 2.31, '
            'before any training; with compute="int8" it is 2.31'
        )
    if config.weights == "int4":
        found.append(
            'weights="int4" costs accuracy: trained with it, SmolLM2-135M ends with a loss 2.8 % above that of bf16; '
            'with weights="int8" 0.03 %'
        )
    return found


def dequantize(model: nn.Module) -> None:
    """Undoes ``quantize``."""
    for module in model.modules():
        if vars(module).pop("lowbit", None) is None:
            continue
        if isinstance(module, WithExperts):
            use_class(module, type(module).stock)
        for plain, swapped in _CLASSES.items():
            if type(module) is swapped:  # a class that others have derived from it since computes its own way again
                use_class(module, plain)


def roundings_of(model: nn.Module) -> list[Rounding]:
    """The random bits of a quantized model: one, or several where its parts were quantized one by one."""
    found = {id(how.rounding): how.rounding for how in (vars(m).get("lowbit") for m in model.modules()) if how}
    return list(found.values())


def rounding_of(model: nn.Module) -> Rounding | None:
    """The random bits of a quantized model, or of one within it."""
    return next(iter(roundings_of(model)), None)


def number_steps(model: nn.Module, seed: int, step: int) -> None:
    """Says which step the next backwards are of; with the seed it decides all random bits of them."""
    for part, rounding in enumerate(roundings_of(model)):
        rounding.seed, rounding.step = seed + part, step
