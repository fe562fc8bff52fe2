"""``HostUpdates``: parameters, in RAM or on a GPU, whose states rest in RAM and are updated there by the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .home import Homes, mark
from .kernels import native
from .kernels.adam import AdamTensor, state_tensor
from .staging import Stagings, sum_of_bits
from .state import State

Item = tuple[Tensor, Mapping[str, Any], State]  # a parameter, its group and its state


class HostUpdates:
    """Steps parameters by the kernel of the CPU.

    Attributes:
        homes: where the kernel finds each weight.
        stagings: through which gradients and weights of a GPU pass.
    """

    def __init__(self) -> None:
        self.homes = Homes()
        self.stagings = Stagings()

    def tensor(self, item: Item, grad: Tensor, seed: int, scale: float, step: int) -> AdamTensor:
        """The kernel's view of a parameter, for its `step`-th step."""
        p, group, state = item
        home = self.homes[p]
        return state_tensor(state, group, seed, home.weight, grad, scale, step, home.copy)

    def step_in_ram(self, work: Sequence[Item], seed: int, scale: float, threads: int | None) -> int:
        """Steps parameters that are in RAM. Returns the number of blocks left out."""
        tensors = []
        for item in work:
            p, _, state = item
            assert p.grad is not None
            tensors.append(self.tensor(item, p.grad.detach().contiguous().view(-1), seed, scale, state["step"] + 1))
        skipped = native.adam_step(tensors, threads) if tensors else 0
        for p, *_ in work:
            home = self.homes[p]
            if home.resident.data_ptr() != p.data_ptr():  # a parameter that is not contiguous
                p.copy_(home.resident.view(p.shape))
            else:
                torch.autograd.graph.increment_version(p)
            home.seen = mark(p)
        return skipped

    def step_from_device(
        self, device: torch.device, work: Sequence[Item], known: Iterable[Tensor], seed: int, scale: float, **how: Any
    ) -> int:
        """Steps parameters of a GPU. Returns the number of blocks left out.

        Args:
            known: all parameters that are stepped there at times.
            how: ``threads`` and ``staging_bytes``; see ``LowBitAdamW``.
        """
        items = {p: (p, group, state) for p, group, state in work}
        params = [p for p in known if p in self.homes and p.device == device]

        def tensor_of(p: Tensor, start: int, stop: int, grad: Tensor) -> AdamTensor:
            whole = self.tensor(items[p], grad, seed, scale, items[p][2]["step"] + 1)
            return whole if stop - start == p.numel() else whole.part(start, stop)

        def update(tensors: list[AdamTensor]) -> int:
            return native.adam_step(tensors, how["threads"])

        with torch.cuda.device(device):
            staging = self.stagings.of(device, params, how["staging_bytes"])
            try:
                return staging.step(items, tensor_of, update, lambda p: self.homes[p].resident)
            finally:
                for p in items:
                    home = self.homes[p]
                    home.seen, home.total = mark(p), sum_of_bits(p)
