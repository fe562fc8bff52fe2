"""Which parameters the optimizer takes, and how many bits the states of each one get."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST_LOW_BIT = 4096  # a parameter of fewer values keeps fp32 states
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def param_bits(model: nn.Module, state_bits: int) -> dict[Tensor, int]:
    """The width of each parameter's states by the default rule.

    Norms, biases and all other vectors keep 32 bits; embeddings and the output head get at least 8, for their moments
    suffer in 4; the rest gets `state_bits`. (Whatever has fewer than 4,096 values keeps 32 bits in any case.)

    Args:
        model: any module; of a Hugging Face model the output head is asked for.
        state_bits: 4, 8 or 32.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    wide = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
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
    if group["state_bits"] not in (4, 8, 32):
        raise ValueError(f"state_bits is {group['state_bits']}: 4, 8 or 32.")
    if group["master_bits"] not in (16, 24, 32):
        raise ValueError(f"master_bits is {group['master_bits']}: 16, 24 or 32.")
    names = group.get("param_names")
    for i, p in enumerate(group["params"]):
        if p.dtype not in DTYPES:
            name = names[i] if names else f"parameter {i} of its group"
            raise TypeError(f"{name}, shape {tuple(p.shape)}, is {p.dtype}; float32, bfloat16 and float16 are taken.")
