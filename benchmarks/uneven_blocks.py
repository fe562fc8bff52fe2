"""What codes of the moments do where the gradients of one block differ in size: the table of docs/numerics.md.

    python benchmarks/uneven_blocks.py

Simulated in fp32 with exact stochastic rounding to the code books. Gradients have sizes exp(sigma N(0,1)). Reported are
updates in learning rates (their root mean square, the largest, and their mean over the values of smaller gradients),
for gradients of a mean of 0.3 of their size; and the mean square that is left of weights that start at 0.3 in a
quadratic with gradients as noisy as 1, after 1,500 steps of 1e-3.
"""

from __future__ import annotations

import argparse
import math

import torch
from state_codes import M_CODES, V_CODES, stochastic
from torch import Tensor

VALUES = 16384
# name: (code of m, code of sqrt(v), block, bound of an update); E2M2 has 4 exponents and 4 mantissas
E2M2 = [(4 + b) * 2.0**e / 56 for e in range(4) for b in range(4)]
CODES = {**M_CODES, **V_CODES, "E2M2": E2M2}
RECIPES: dict[str, tuple[str, str, int, float] | None] = {
    "fp32": None,
    "linear -7..7, E3M1": ("linear -7..7", "E3M1", 128, math.inf),
    "linear -7..7, E3M1, clamped at 3": ("linear -7..7", "E3M1", 128, 3.0),
    "linear -7..7, E2M2": ("linear -7..7", "E2M2", 128, math.inf),
    "powers of two less one, E3M1 (4 bits)": ("powers of two less one", "E3M1", 128, math.inf),
    "linear -127..127, E4M4": ("linear 8 bits", "E4M4", 256, math.inf),
    "linear -127..127, E3M5 (8 bits)": ("linear 8 bits", "E3M5", 256, math.inf),
}


def rounded(x: Tensor, code: str, block: int, gen: torch.Generator) -> Tensor:
    values = x.view(-1, block)
    scale = values.abs().amax(1, keepdim=True)
    levels = torch.tensor(CODES[code])
    return (stochastic(values / scale, levels, scale, gen) * scale).view(-1)


def run(recipe: tuple[str, str, int, float] | None, sigma: float, steps: int, quadratic: bool) -> tuple[Tensor, ...]:
    """(weights at the end, updates of the last 200 steps, largest update of the second half, sizes)."""
    gen, chance = torch.Generator().manual_seed(1), torch.Generator().manual_seed(5)
    size = torch.exp(sigma * torch.randn(VALUES, generator=gen))
    w = torch.full((VALUES,), 0.3)
    m, v, largest, updates = torch.zeros(VALUES), torch.zeros(VALUES), torch.zeros(()), []
    for t in range(1, steps + 1):
        noise = torch.randn(VALUES, generator=gen)
        grad = size * (noise + (w if quadratic else 0.3))
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.square()
        root = v.sqrt()
        update = (m / (1 - 0.9**t)) / (root / math.sqrt(1 - 0.999**t) + 1e-12)
        if recipe:
            update = update.clamp(-recipe[3], recipe[3])
            m, root = rounded(m, recipe[0], recipe[2], chance), rounded(root, recipe[1], recipe[2], chance)
            v = root.square()
        w = w - 1e-3 * update
        if t > steps // 2:
            largest = torch.maximum(largest, update.abs().max())
        updates = [*updates, update][-200:]
    return w, torch.stack(updates), largest, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for sigma in args.sigma:
        print(f"\nsigma {sigma:g}\n\n| m, sqrt(v) | rms | largest | mean, smaller half | mean square left |")
        print("| --- | --- | --- | --- | --- |")
        for name, recipe in RECIPES.items():
            _, updates, largest, size = run(recipe, sigma, 800, quadratic=False)
            left = run(recipe, sigma, 1500, quadratic=True)[0].square().mean()
            small = updates[:, size < size.median()].mean()
            print(
                f"| {name} | {updates.square().mean().sqrt():.3f} | {largest:.1f} | {small:.3f} | {left:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
