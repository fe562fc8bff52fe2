"""Parameters whose states stay where they are, on a GPU, and are updated there by the Triton kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .home import Mark, mark
from .kernels.adam import AdamTensor, state_tensor
from .staging import sum_of_bits
from .state import State, new_state


@dataclass
class _Seen:
    """What a parameter was like after our last write: ``home.mark``, and on its device the sum of its bits."""

    mark: Mark
    total: Tensor


class ResidentUpdates:
    """Steps parameters on their device. Nothing waits for the device."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, _Seen] = {}
        self._skipped: dict[torch.device, Tensor] = {}

    def prepare(self, p: Tensor, state: State, wanted: int | None) -> None:
        """Brings a state to its parameter's device and makes its master fit the weight.

        A weight that somebody else has written since the last step has lost its 24-bit master: that starts at the
        weight again. (In RAM only those values lose it that were written; here is no copy to compare with.)

        Args:
            wanted: bits of the master, 16 or 24; None for an fp32 weight.
        """
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device != p.device:
                state[name] = value.to(p.device)
        if wanted != 24:
            state.pop("extension", None)
            return
        if "extension" not in state:
            state["extension"] = torch.zeros(p.numel(), dtype=torch.int8, device=p.device)
        seen = self._seen.get(p)
        if seen is None:
            return
        if seen.mark != mark(p):
            state["extension"].zero_()
        else:  # written through .data, say: found out on the device, by nobody else
            state["extension"].mul_((sum_of_bits(p) == seen.total).to(torch.int8))

    def knows(self, p: Tensor) -> bool:
        """Whether a parameter has been stepped here."""
        return p in self._seen

    def forget(self, p: Tensor) -> None:
        """Forgets what a parameter was like: it is about to be moved, or stepped elsewhere."""
        self._seen.pop(p, None)

    def step(self, tensors: Sequence[tuple[Tensor, AdamTensor]]) -> None:
        """Steps parameters, each with the kernel's view of it."""
        from .kernels import triton_adam

        for device in {p.device for p, _ in tensors}:
            with torch.cuda.device(device if device.type == "cuda" else -1):
                skipped = triton_adam.adam_step([t for p, t in tensors if p.device == device])
            known = self._skipped.get(device)
            self._skipped[device] = skipped if known is None else known + skipped
        for p, _ in tensors:
            torch.autograd.graph.increment_version(p)
            self._seen[p] = _Seen(mark(p), sum_of_bits(p))

    def skipped_blocks(self) -> int:
        """Blocks left as they were for their gradients, so far. Waits for the device."""
        return sum(int(skipped) for skipped in self._skipped.values())


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why parameters on a device cannot be updated there: what goes wrong when that is tried; None if nothing does.

    Triton may be missing, or the C compiler that it calls, or it may not know the GPU.
    """
    try:
        from .kernels import triton_adam

        value = torch.zeros(256, dtype=torch.bfloat16, device=device)
        group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        state = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in new_state(256, 4, 0).items()}
        with torch.cuda.device(device if device.type == "cuda" else -1):
            triton_adam.adam_step([state_tensor(state, group, 0, value, value.clone(), 1.0, 1)])
    except Exception as error:  # whatever it is, the states can rest in RAM instead
        return f"{type(error).__name__}: {error}"
    return None


def state_in_ram(state: dict[str, Any]) -> dict[str, Any]:
    """A state with all its tensors in RAM, to be saved."""
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
