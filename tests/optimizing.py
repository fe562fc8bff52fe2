"""What the tests of the optimizer share: parameters of all kinds of shapes, gradients, steps, a file."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn

from hf_lowmem.optim import LowBitAdamW

SHAPES = [(100, 70), (5000,), (3, 33, 50), (), (3,), (1,), (0, 4)]
WIDTHS = [(4, 24), (4, 16), (4, 32), (8, 24), (32, 24), (32, 32)]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    gen = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * (torch.randn(p.shape, generator=gen) + 0.2)).to(p.dtype)


def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> list[nn.Parameter]:
    for step in steps:
        give_gradients(params, 100 + step)
        optimizer.step()
    return params


def same(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved(optimizer: torch.optim.Optimizer) -> dict:
    """What a new process finds in the file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def states_equal(a: LowBitAdamW, b: LowBitAdamW) -> bool:
    left, right = saved(a)["state"], saved(b)["state"]
    return left.keys() == right.keys() and all(
        torch.equal(x, right[i][k]) if isinstance(x, Tensor) else x == right[i][k]
        for i, state in left.items()
        for k, x in state.items()
    )
