"""Which parameters the optimizer takes, and how many bits the states of each one get."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST_LOW_BIT = 4096  # a parameter of fewer values keeps fp32 states
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def loaded_groups(saved: Mapping[str, Any], own: Sequence[dict[str, Any]], layout: int) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer that loads a state dict: hyperparameters as saved, widths as they are.

    Args:
        saved: the state dict, of ours or of torch.optim.AdamW.
        own: the groups of the optimizer that loads.
        layout: number of the layout of states that this version writes.

    Raises:
        ValueError: no state dict, groups of other sizes, of a later layout, of another optimizer than AdamW, or with
            hyperparameters out of range.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise ValueError("this is no optimizer's state dict: it lacks state or param_groups. The file is damaged.")
    sizes, wanted = ([len(g["params"]) for g in groups] for groups in (saved["param_groups"], own))
    if sizes != wanted:
        raise ValueError(
            f"the saved optimizer has parameter groups of {sizes} parameters, this one of {wanted}: they belong to "
            "different models, or other parameters were frozen."
        )
    groups = []
    for theirs, ours in zip(saved["param_groups"], own, strict=True):
        missing = {"lr", "betas", "eps", "weight_decay"} - theirs.keys()
        if missing or theirs.get("maximize") or theirs.get("amsgrad") or theirs.get("decoupled_weight_decay") is False:
            raise ValueError(
                "the saved optimizer is another one than AdamW that minimizes, without amsgrad and with decoupled "
                "weight decay. Train on with it, or load the weights alone."
            )
        if theirs.get("format", layout) != layout:
            raise ValueError(
                f"the states were written in layout {theirs['format']}, and this version of hf_lowmem reads {layout}. "
                "Install the version that wrote them."
            )
        kept = {
            key: ours[key] for key in ("params", "param_names", "state_bits", "master_bits", "format") if key in ours
        }
        group = {**deepcopy({k: v for k, v in theirs.items() if k != "params"}), **kept}
        check_group(group)
        groups.append(group)
    return groups


def param_bits(model: nn.Module, state_bits: int) -> dict[Tensor, int]:
    """The width of each parameter's states by the default rule.

    Norms, biases and all other vectors keep 32 bits; embeddings and the output head get at least 8, for their moments
    suffer in 4; the rest gets `state_bits`. (Whatever has fewer than 4,096 values keeps 32 bits in any case.)

    Args:
        model: any module; of a Hugging Face model the output head is asked for.
        state_bits: 4, 8 or 32.
    """
    wide = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for module in model.modules():  # the model itself may stand in a wrapper
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            wide |= {id(p) for p in head.parameters()}
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    bits: dict[Tensor, int] = {}
    for p in model.parameters():
        if p.ndim <= 1 or id(p) in norms:
            bits[p] = 32
        else:
            bits[p] = max(8, state_bits) if id(p) in wide else state_bits
    return bits


def check_whole(name: str, value: Any, hint: str, least: int = 1) -> None:
    """Raises: ValueError unless the value is a whole number of `least` or more, or None where the hint says so."""
    if value is None and hint.startswith("None"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ValueError(f"{name} is {value!r}: a whole number of {least} or more ({hint}).")


def check_settings(threads: Any, max_skipped_steps: Any, staging_bytes: Any, seed: Any, bits: Any) -> None:
    """Of an optimizer. Raises: ValueError naming the one that is out of range."""
    check_whole("threads", threads, "None for the physical cores less one")
    check_whole("max_skipped_steps", max_skipped_steps, "None for no limit")
    check_whole("staging_bytes", staging_bytes, "two slots are kept in any case")
    check_whole("seed", seed, "0 is the default", least=0)
    check_param_bits(bits)


def check_param_bits(bits: Mapping[Tensor, int]) -> None:
    """Raises: ValueError unless every key is a parameter and every value a width."""
    for key, width in bits.items():
        if not isinstance(key, Tensor):
            raise ValueError(f"param_bits has the key {key!r}: its keys are parameters, not their names.")
        if width not in (4, 8, 32) or not isinstance(width, int):
            raise ValueError(f"param_bits has {width!r} for a parameter of shape {tuple(key.shape)}: 4, 8 or 32.")


def check_group(group: Mapping[str, Any]) -> None:
    """Refuses a parameter group.

    Raises:
        ValueError: a hyperparameter or a width out of range.
        TypeError: a parameter of another dtype than `DTYPES`.
    """
    beta1, beta2 = group["betas"]
    lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr is {lr}: a finite number, 0 or more.")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas is {tuple(group['betas'])}: each from 0 to under 1.")
    if not (eps > 0 and math.isfinite(eps)):
        raise ValueError(f"eps is {eps}: more than 0 (1e-8 is usual); it guards a division.")
    if not (decay >= 0 and math.isfinite(decay)):
        raise ValueError(f"weight_decay is {decay}: a finite number, 0 or more.")
    for name, widths in (("state_bits", (4, 8, 32)), ("master_bits", (16, 24, 32))):
        if not isinstance(group[name], int) or group[name] not in widths:
            raise ValueError(f"{name} is {group[name]!r}: {widths[0]}, {widths[1]} or {widths[2]}, a whole number.")
    names = group.get("param_names")
    for i, p in enumerate(group["params"]):
        if p.dtype not in DTYPES:
            name = names[i] if names else f"parameter {i} of its group"
            raise TypeError(f"{name}, shape {tuple(p.shape)}, is {p.dtype}; float32, bfloat16 and float16 are taken.")


def check_gradient(p: Tensor, name: str, stays: bool = False) -> None:
    """Raises: TypeError for a gradient that no step can be done with.

    Args:
        stays: whether the parameter is updated on its device.
    """
    assert p.grad is not None
    if p.grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name}, shape {tuple(p.shape)}, is sparse ({p.grad.layout}): LowBitAdamW takes "
            "dense gradients only. Build the embedding with sparse=False."
        )
    if p.grad.dtype not in DTYPES:
        raise TypeError(f"the gradient of {name} is {p.grad.dtype}; float32, bfloat16 and float16 are taken.")
    if p.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name} is on {p.device}; parameters may be on the CPU or on a CUDA GPU.")
    if p.device.type == "cuda" and ((p.grad.dtype is not p.dtype and not stays) or p.grad.device != p.device):
        raise TypeError(
            f"{name} is {p.dtype} on {p.device} and its gradient {p.grad.dtype} on {p.grad.device}; on a GPU "
            "both must be of one dtype and on one device."
        )


def too_many_skipped(count: int) -> FloatingPointError:
    """After so many steps in a row whose gradients were not finite."""
    return FloatingPointError(
        f"{count} steps in a row had gradients that were not finite and were skipped; the weights are those of the "
        "last whole step. Lower the learning rate, look for bad samples, or raise max_skipped_steps."
    )
