"""Thousands of steps of a small model: what a short fine-tuning run cannot show.

    python benchmarks/long_run.py --out benchmarks/results/long_run.md

A second moment that is rounded badly drifts over a thousand steps and more (1 / (1 - beta2)), so here a character model
is trained from scratch on Python's own sources, on the CPU, by LowBitAdamW at 4 and 8 bits and by torch's AdamW, all in
fp32 weights so that only the states differ. Reported besides the loss: how far the second moments' roots lie from those
that fp32 states would have for the same gradients.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_lowmem.optim import LowBitAdamW, param_bits
from hf_lowmem.state import moments

LENGTH, BATCH, WIDTH, DEPTH = 64, 32, 96, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Characters(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(symbols, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.size(1)]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def text() -> tuple[Tensor, Tensor, int]:
    """Training and held-out characters, and how many different ones there are."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    sides = ["".join(f.read_text("utf-8", "ignore") for f in part) for part in (files[::2], files[1::8])]
    symbols = sorted(set(sides[0]))[:128]
    numbers = {c: i for i, c in enumerate(symbols)}
    train, held = (torch.tensor([numbers.get(c, 0) for c in side]) for side in sides)
    return train, held[: 400 * (LENGTH + 1)].view(400, LENGTH + 1), len(symbols)


def run(kind: str, seed: int, steps: int, lr: float) -> tuple[float, float | None]:
    """(held-out loss, mean ratio of the roots of v to what fp32 states would be)."""
    train, held, symbols = text()
    torch.manual_seed(seed)
    model = Characters(symbols)
    bits = {"4": 4, "8": 8}.get(kind)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=lr)
        if bits is None
        else LowBitAdamW(model.parameters(), lr=lr, state_bits=bits, param_bits=param_bits(model, bits), seed=seed)
    )
    probe = model.blocks[1].up.weight
    exact = torch.zeros_like(probe)
    gen = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / steps)
        starts = torch.randint(len(train) - LENGTH - 1, (BATCH,), generator=gen)
        loss = model.loss(torch.stack([train[s : s + LENGTH + 1] for s in starts]))
        optimizer.zero_grad()
        loss.backward()
        assert probe.grad is not None
        exact.mul_(0.999).addcmul_(probe.grad, probe.grad, value=0.001)
        optimizer.step()
    with torch.no_grad():
        lost = model.loss(held).item()
    if bits is None:
        return lost, None
    kept = moments(optimizer.state[probe], probe.numel())[1].sqrt()
    return lost, (kept.sum() / exact.sqrt().sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the products are too small to be shared
    lines = ["| seed | fp32 | 4 bits | 8 bits | root of v, 4 bits : exact | 8 bits : exact |", "|" + " --- |" * 6]
    for seed in args.seeds:
        found = {kind: run(kind, seed, args.steps, args.lr) for kind in ("32", "4", "8")}
        reference = found["32"][0]
        cells = [f"{reference:.4f}", *(f"{found[k][0]:.4f} ({found[k][0] / reference:.4f}x)" for k in "48")]
        lines.append(f"| {seed} | {' | '.join(cells)} | {found['4'][1]:.3f} | {found['8'][1]:.3f} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
