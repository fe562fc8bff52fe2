"""``Again``: a micro-batch that has failed for want of memory, and is done again with more of it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


@dataclass
class Again:
    """What it takes to do a micro-batch again that has failed.

    Args:
        model: the model, none of whose parameters had a gradient.
        states: of the random number generators of torch, and of its GPU.
    """

    model: nn.Module
    states: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, model: nn.Module | None) -> Again | None:
        """None where gradients are there already, to which a failed backward may have added some."""
        if model is None or any(p.grad is not None for p in model.parameters()):
            return None
        return cls(model, (torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None))

    def restore(self) -> None:
        self.model.zero_grad()
        torch.set_rng_state(self.states[0])
        if self.states[1] is not None:
            torch.cuda.set_rng_state(self.states[1])


def fresh(arguments: Any) -> Any:
    """Arguments whose mappings of inputs may be emptied by a Trainer, as label smoothing does."""
    if isinstance(arguments, dict):
        return {key: copy(x) if isinstance(x, MutableMapping) else x for key, x in arguments.items()}
    return tuple(copy(x) if isinstance(x, MutableMapping) else x for x in arguments)


def largest(*arguments: Any) -> int:
    """Values of the largest tensor among the arguments."""
    sizes = [0]
    for x in tree_flatten(arguments)[0]:
        if isinstance(x, Tensor):
            sizes.append(x.numel())
        elif isinstance(x, Mapping):  # transformers' BatchEncoding is one, and no dict
            sizes.append(largest(*x.values()))
    return max(sizes)
