"""Products in 8-bit integers against bf16: the kernels, and a linear layer's forward and backward.

    python benchmarks/integer.py --tokens 8192 16384 --out benchmarks/results/integer.md

First the product ``x @ w.T`` of each shape: bf16, torch's integer product alone, ours with its scales, and ours with
the quantisation of the tokens, and of both. Then a layer's three products together, with all that it does besides.
Random tensors; all contestants of a shape take turns in one process; medians.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowmem.integers import engine_of
from hf_lowmem.kernels.int8 import integer_product
from hf_lowmem.lowbit import quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # inputs, outputs: attention, and both ways of the feed-forward part, of models of about these sizes
    "1B": [(2048, 2048), (2048, 8192), (8192, 2048)],
    "8B": [(4096, 4096), (4096, 14336), (14336, 4096)],
    "70B": [(8192, 8192), (8192, 28672), (28672, 8192)],
}


@functools.cache
def busy() -> Tensor:
    return torch.ones(8192, 8192, device=DEVICE, dtype=torch.bfloat16)


def seconds(run: Callable[[], object]) -> float:
    """Of one call, on the device."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        busy() @ busy()  # meanwhile the launches are prepared, as they are in a training that the GPU is busy with
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def medians(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each; they take turns. The first round, in which kernels are compiled and tuned, does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            taken = seconds(run)
            if number:
                times[name].append(taken)
    return {name: statistics.median(found) for name, found in times.items()}


def products(tokens: int, inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(tokens, inputs, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) * 0.02
    engine = engine_of(torch.device(DEVICE))
    rows_x, rows_w = engine.rotated_rows(x)[0], engine.rotated_rows(w)[0]
    found: dict[str, Callable[[], object]] = {
        "bf16": lambda: x @ w.t(),
        "torch's integers": lambda: integer_product(rows_x.codes, rows_w.codes),
        "ours": lambda: engine.product(rows_x, rows_w, torch.bfloat16),
        "ours, tokens quantised": lambda: engine.product(engine.rotated_rows(x)[0], rows_w, torch.bfloat16),
        "ours, both quantised": lambda: engine.product(
            engine.rotated_rows(x)[0], engine.rotated_rows(w)[0], torch.bfloat16
        ),
    }
    peer = _torchao()
    if peer is not None:
        column, row = rows_w.scale[None, :].bfloat16(), rows_x.scale[:, None].bfloat16()
        found["torchao"] = lambda: peer(rows_x.codes, rows_w.codes.t(), row, column)
    return found


def _torchao() -> Callable[..., Tensor] | None:
    try:
        from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm
    except ImportError:
        return None
    return scaled_int8_mm if DEVICE == "cuda" else None  # type: ignore[no-any-return]


def layers(tokens: int, inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
    """Forward and backward, with gradients of tokens and weight."""
    x = torch.randn(tokens, inputs, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, outputs, device=DEVICE, dtype=torch.bfloat16)

    def contestant(**options: Any) -> Callable[[], object]:
        model = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device=DEVICE, dtype=torch.bfloat16))
        if options:
            quantize(model, **options)
        return lambda: torch.autograd.grad(model(x), [x, model[0].weight], g)

    return {
        "bf16": contestant(),
        "int8, weight gradients in bf16": contestant(compute="int8", grad_weight="model"),
        "int8": contestant(compute="int8", grad_weight="int8"),
    }


def table(title: str, make: Callable[[int, int, int], dict[str, Callable[[], object]]], args: Any, work: int) -> str:
    """A Markdown table. ``work``: multiplications and additions for each token, input and output."""
    lines: list[str] = []
    for tokens in args.tokens:
        for size in args.sizes:
            for inputs, outputs in SHAPES[size]:
                found = medians(make(tokens, inputs, outputs), args.rounds)
                if not lines:
                    lines = [
                        "| tokens | inputs | outputs | " + " | ".join(found) + " |",
                        "| --- " * (3 + len(found)) + "|",
                    ]
                amount, bf16 = work * tokens * inputs * outputs / 1e12, found["bf16"]
                cells = [f"{amount / s:.0f} ({bf16 / s:.2f}x)" for s in found.values()]
                lines.append(f"| {tokens} | {inputs} | {outputs} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    return f"\n## {title}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tables", nargs="+", choices=["products", "layers"], default=["products", "layers"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    engine = engine_of(torch.device(DEVICE)).__name__
    text = f"{name}, torch {torch.__version__}, {engine}. Tera-operations a second, and against bf16; medians.\n"
    if "products" in args.tables:
        text += table("One product", products, args, 2)
    if "layers" in args.tables:
        text += table("A layer's forward and backward", layers, args, 6)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
