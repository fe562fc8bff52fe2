"""Which four bits: code books for the two moments, simulated in fp32 and compared on a real model.

    python benchmarks/state_codes.py --out benchmarks/results/state_codes.md

Every recipe keeps fp32 values that its code can represent: after each step the moments are rounded to the code book,
blockwise, to nearest or stochastically. Embeddings get 8 bits and vectors fp32, as in the library. So only the code
books differ; kernels and packing play no part.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from finetune import Finetune, Step, compare, table
from torch import Tensor

from hf_lowmem.codec import as_blocks

BLOCK = 128
Rounding = Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]  # (x, levels, scale, random) -> x


def nearest(x: Tensor, levels: Tensor, scale: Tensor, gen: torch.Generator) -> Tensor:
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


def stochastic(x: Tensor, levels: Tensor, scale: Tensor, gen: torch.Generator) -> Tensor:
    """Between the two neighbours, so that the mean is x."""
    low, high = _neighbours(x, levels)
    return _choose((x - low) / (high - low), low, high, gen)


def zip_sr(x: Tensor, levels: Tensor, scale: Tensor, gen: torch.Generator) -> Tensor:
    """Between the two neighbours, so that the mean of 1 / (x + eps) is exact; zero may be a level."""
    low, high = _neighbours(x, levels)

    def f(y: Tensor) -> Tensor:
        return 1 / (y * scale + 1e-8)

    return _choose(1 - (f(x) - f(high)) / (f(low) - f(high)), low, high, gen)


def eden(x: Tensor, levels: Tensor, scale: Tensor, gen: torch.Generator) -> Tensor:
    """To nearest, then the block rescaled by |x|**2 / <x, rounded>."""
    rounded = nearest(x, levels, scale, gen)
    return rounded * (x.square().sum(1, True) / (x * rounded).sum(1, True).clamp_min(1e-30))


def _neighbours(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.bucketize(x, levels, right=True).clamp(1, len(levels) - 1)
    return levels[at - 1], levels[at]


def _choose(chance: Tensor, low: Tensor, high: Tensor, gen: torch.Generator) -> Tensor:
    drawn = torch.rand(chance.shape, device=chance.device, generator=gen)
    return torch.where(drawn < chance.clamp(0, 1), high, low)


def symmetric(magnitudes: list[float]) -> list[float]:
    return sorted({s * x for x in magnitudes for s in (1, -1)})


M_CODES = {
    "linear -7..7": symmetric([k / 7 for k in range(8)]),
    "linear without zero": [(2 * k - 15) / 15 for k in range(16)],
    "0,1,4,11,30,63,95,127": symmetric([k / 127 for k in (0, 1, 4, 11, 30, 63, 95, 127)]),
    "0,1,4,9,26,55,88,127": symmetric([k / 127 for k in (0, 1, 4, 9, 26, 55, 88, 127)]),
    "DE4 (lpmm, torchao)": sorted(
        [*symmetric([0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]), 0.0, 1.0],
    ),
    "NF4": [
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0),
    ],
    "E2M1": symmetric([k / 6 for k in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]),
    "powers of two less one": symmetric([(2**k - 1) / 127 for k in range(8)]),
    "linear 8 bits": symmetric([k / 127 for k in range(128)]),
}
V_CODES = {
    "linear": [i / 16 for i in range(1, 17)],
    "with zero": [i / 15 for i in range(16)],
    "E3M1": [(2 + b) * 2.0**e / 384 for e in range(8) for b in (0, 1)],
    "E3M5": [(32 + b) * 2.0**e / (63 * 2.0**7) for e in range(8) for b in range(32)],
    "E4M4": [(16 + b) * 2.0**e / (31 * 2.0**15) for e in range(16) for b in range(16)],
}


@dataclass(frozen=True)
class Recipe:
    """Code books and roundings; None keeps a moment in fp32. `root`: v is coded as its square root."""

    m: tuple[str, Rounding] | None = None
    v: tuple[str, Rounding] | None = None
    root: bool = True
    block: int = BLOCK


OURS8 = Recipe(("linear 8 bits", stochastic), ("E3M5", stochastic), block=256)
RECIPES = {
    "fp32": Recipe(),
    "m powers less one SR, sqrt(v) E3M1 SR (the format)": Recipe(
        ("powers of two less one", stochastic), ("E3M1", stochastic)
    ),
    "m linear SR, sqrt(v) E3M1 SR": Recipe(("linear -7..7", stochastic), ("E3M1", stochastic)),
    "m linear without zero SR, sqrt(v) E3M1 SR": Recipe(("linear without zero", stochastic), ("E3M1", stochastic)),
    "m k8 SR, sqrt(v) E3M1 SR": Recipe(("0,1,4,11,30,63,95,127", stochastic), ("E3M1", stochastic)),
    "m E2M1 SR, sqrt(v) E3M1 SR": Recipe(("E2M1", stochastic), ("E3M1", stochastic)),
    "m NF4 SR, sqrt(v) E3M1 SR": Recipe(("NF4", stochastic), ("E3M1", stochastic)),
    "m NF4 nearest, sqrt(v) E3M1 SR": Recipe(("NF4", nearest), ("E3M1", stochastic)),
    "m k8 nearest, sqrt(v) E3M1 SR": Recipe(("0,1,4,11,30,63,95,127", nearest), ("E3M1", stochastic)),
    "m odd gaps nearest, sqrt(v) linear SR": Recipe(("0,1,4,9,26,55,88,127", nearest), ("linear", stochastic)),
    "m DE4 nearest, sqrt(v) linear SR": Recipe(("DE4 (lpmm, torchao)", nearest), ("linear", stochastic)),
    "m linear SR, sqrt(v) linear SR": Recipe(("linear -7..7", stochastic), ("linear", stochastic)),
    "m linear SR, v linear SR": Recipe(("linear -7..7", stochastic), ("linear", stochastic), root=False),
    "m linear SR, sqrt(v) E3M1 nearest": Recipe(("linear -7..7", stochastic), ("E3M1", nearest)),
    "m linear SR, sqrt(v) ZIP-SR": Recipe(("linear -7..7", stochastic), ("with zero", zip_sr)),
    "m linear SR, v ZE-EDEN": Recipe(("linear -7..7", stochastic), ("linear", eden), root=False),
    "m DE4 nearest, v linear nearest (torchao)": Recipe(
        ("DE4 (lpmm, torchao)", nearest), ("linear", nearest), root=False
    ),
    "8 bits: m linear SR, sqrt(v) E3M5 SR (the format)": OURS8,
    "8 bits: m linear SR, sqrt(v) E4M4 SR": Recipe(("linear 8 bits", stochastic), ("E4M4", stochastic), block=256),
    "m alone, linear SR": Recipe(m=("linear -7..7", stochastic)),
    "v alone, sqrt E3M1 SR": Recipe(v=("E3M1", stochastic)),
}


class Simulation:
    """AdamW over three flat fp32 arrays: vectors in fp32, embeddings in 8 bits, the rest by the recipe."""

    def __init__(self, data: Finetune, recipe: Recipe, seed: int) -> None:
        self.gen = torch.Generator(data.device).manual_seed(seed + 77)
        self.parts: list[tuple[Recipe, list[Tensor], Tensor, Tensor, Tensor]] = []
        wide = OURS8 if recipe.m or recipe.v else recipe
        kinds: dict[int, list[str]] = {}
        for name, p in data.params.items():
            kinds.setdefault(0 if p.ndim < 2 else 1 if "embed" in name else 2, []).append(name)
        for kind, names in kinds.items():
            w = torch.cat([data.start[n].flatten() for n in names])
            book = (Recipe(), wide, recipe)[kind]
            self.parts.append((book, [data.params[n] for n in names], w, torch.zeros_like(w), torch.zeros_like(w)))
        self.number = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.number += 1
        for recipe, params, w, m, v in self.parts:
            grad = torch.cat([p.grad.flatten() for p in params if p.grad is not None]).float()
            m.lerp_(grad, 0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            root = v.sqrt() / math.sqrt(1 - 0.999**self.number)
            w.addcdiv_(m, root.add_(1e-8), value=-lr / (1 - 0.9**self.number))
            self._round(m, recipe.m, False, recipe.block)
            self._round(v, recipe.v, recipe.root, recipe.block)
            for p, values in zip(params, w.split([p.numel() for p in params]), strict=True):
                p.copy_(values.view_as(p))

    def _round(self, x: Tensor, code: tuple[str, Rounding] | None, root: bool, block: int) -> None:
        if code is None:
            return
        levels = torch.tensor({**M_CODES, **V_CODES}[code[0]], device=x.device)
        values = as_blocks(x.sqrt() if root else x, block)
        scale = values.abs().amax(1, keepdim=True).clamp_min(1e-30)
        rounded = (code[1](values / scale, levels, scale, self.gen) * scale).view(-1)[: x.numel()]
        x.copy_(rounded.square() if root else rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--losses", type=Path, help="JSON of losses found before; extended")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = Finetune(args.model, args.device)
    before = data.evaluate()

    def maker(recipe: Recipe) -> Callable[[int], Step]:
        return lambda seed: Simulation(data, recipe, seed).step

    chosen = {name: maker(recipe) for name, recipe in RECIPES.items()}
    text = f"Learning rate {args.lr:g}, {args.steps} steps of {16 * 512} tokens, torch {torch.__version__}.\n\n"
    text += table(compare(data, chosen, args.lr, args.steps, args.seeds, args.budget, args.losses), before)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
