"""From how many tokens a step on streaming is free, by how weights cross the link.

    python benchmarks/free_point.py --size 8.0b --forms model int8 int4

A Llama shape with random weights, sequences of 512 random tokens, activations recomputed; forward and backward
without an optimizer, so that nothing but the link holds the GPU up (streaming.py has whole trainings). First the
resident model, then every block streamed, once for each form. Each model is made and attached once; medians of the
steps behind the first two. "Free" is interpolated: where streamed steps reach a share of the resident model's tokens/s.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch
from streaming import DEVICE, SHAPES, make_model, reset_peaks

from hf_lowmem import LowMemConfig, attach
from hf_lowmem.loss import use_chunked_loss

SEQ = 512
TOKENS = [2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288]
WARM_UP = 2  # steps


def speeds(args: argparse.Namespace, offload: str, weights: str) -> dict[int, float]:
    """Tokens/s for each number of tokens a step."""
    model = make_model(args)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    attach(model, LowMemConfig(offload=offload, weights=weights), DEVICE)
    use_chunked_loss(model)
    found = {}
    for count in args.tokens:
        tokens = torch.randint(0, args.vocabulary, (count // SEQ, SEQ), device=DEVICE)
        times = []
        for _ in range(WARM_UP + args.steps):
            wait()
            start = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
            wait()
            times.append(time.perf_counter() - start)
        found[count] = count / statistics.median(times[WARM_UP:])
        print(f"{offload} {weights} {count} tokens: {found[count]:,.0f} tokens/s", flush=True)
    del model
    reset_peaks()
    return found


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def point(resident: dict[int, float], streamed: dict[int, float], share: float) -> float | None:
    """Tokens from which on streaming leaves this share of the resident speed; None if none of those measured does."""
    ratios = [(count, streamed[count] / resident[count]) for count in sorted(streamed)]
    if ratios[0][1] >= share:
        return float(ratios[0][0])  # or fewer
    for (few, below), (many, above) in itertools.pairwise(ratios):
        if below < share <= above:
            return few + (many - few) * (share - below) / (above - below)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="8.0b")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--forms", nargs="+", default=["model", "int8"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.95, 0.97])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.lora = 0
    resident = speeds(args, "none", "model")
    streamed = {form: speeds(args, "cpu", form) for form in args.forms}
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    lines = [
        f"Llama shape {args.size}, forward and backward, sequences of {SEQ}. {name}, torch {torch.__version__}.",
        "Tokens/s, and share of the resident model's.",
        "",
        "| tokens a step | resident | " + " | ".join(streamed) + " |",
        "| --- " * (2 + len(streamed)) + "|",
    ]
    for count, whole in resident.items():
        cells = [f"{found[count]:,.0f} ({found[count] / whole:.1%})" for found in streamed.values()]
        lines.append(f"| {count} | {whole:,.0f} | " + " | ".join(cells) + " |")
    for share in args.shares:
        points = [point(resident, found, share) for found in streamed.values()]
        cells = ["more than measured" if p is None else f"{p:,.0f}" for p in points]
        lines.append(f"| {share:.0%} from | | " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
