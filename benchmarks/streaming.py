"""How much of a model's speed streaming leaves: tokens/s with its blocks in RAM, against the model resident.

    python benchmarks/streaming.py --size 3.2b --cap 24GB --offload cpu 0.5 --out benchmarks/results/streaming.md

A Llama shape with random weights, sequences of random tokens, activations recomputed. First the model resident on the
uncapped card, forward and backward, without any optimizer; then streamed under the cap, without and with the optimizer
(`early`: without clipping, updated during backward). One process; the median of the steps behind the first two.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_lowmem import LowMemConfig, attach, create_optimizer
from hf_lowmem.attachment import streamer_of
from hf_lowmem.config import parse_bytes
from hf_lowmem.loss import use_chunked_loss
from hf_lowmem.trainer import overlap, total_norm

DEVICE = "cuda"
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, tied
    "1.2b": (2048, 8192, 16, 32, 8, True),
    "3.2b": (3072, 8192, 28, 24, 8, True),
    "8.0b": (4096, 14336, 32, 32, 8, False),
}


def make_model(size: str, vocabulary: int) -> LlamaForCausalLM:
    """Random bf16 weights, made on the GPU."""
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        vocab_size=vocabulary,
        rope_theta=500000.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model.train()


def step_seconds(
    model: torch.nn.Module, tokens: torch.Tensor, steps: int, update: Callable[[], None] | None
) -> tuple[float, float]:
    """(median seconds, last loss)."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if update is not None:
            update()
        model.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:] or times), loss.item()


class Update:
    """A step of the default recipe as LowMemTrainer makes it, with clipping at 1, or early and without clipping."""

    def __init__(self, model: torch.nn.Module, early: bool) -> None:
        self.early = early
        self.params = list(model.parameters())
        self.streamer = streamer_of(model)
        self.optimizer = create_optimizer(model, LowMemConfig(), lr=1e-5)
        if self.streamer is not None:
            overlap(self.streamer, self.optimizer)
            self.streamer.early = early

    def __call__(self) -> None:
        if self.early:
            self.optimizer.step()
            return
        norm = total_norm(self.params, self.streamer).item()
        self.optimizer.scale_gradients(min(1.0, 1.0 / (norm + 1e-6)), math.isfinite(norm))
        self.optimizer.step()


@dataclass
class Run:
    tokens_per_s: float
    loss: float
    gpu_gb: float
    rss_gb: float


def measure(args: argparse.Namespace, tokens: torch.Tensor, offload: str, updates: str) -> Run:
    model = make_model(args.size, args.vocabulary)
    attach(model, LowMemConfig(offload=offload), DEVICE)
    update = None if updates == "no" else Update(model, early=updates == "early")
    use_chunked_loss(model)
    torch.cuda.reset_peak_memory_stats()
    seconds, loss = step_seconds(model, tokens, args.steps, update)
    if args.trace:
        trace(model, tokens, update, args.trace / f"{args.size}-{offload}-{updates}.json")
    rss = psutil.Process().memory_info().rss / 1e9
    return Run(tokens.numel() / seconds, loss, torch.cuda.max_memory_allocated() / 1e9, rss)


def trace(model: torch.nn.Module, tokens: torch.Tensor, update: Callable[[], None] | None, path: Path) -> None:
    """Writes what the streams and the CPU's threads did in one step."""
    activities = torch.profiler.supported_activities()  # the CPU's and, with a GPU, CUDA's
    with torch.profiler.profile(activities=activities) as profile:
        step_seconds(model, tokens, 1, update)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="3.2b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cap", default="24GB", help="GPU memory that the streamed runs may take")
    parser.add_argument("--offload", nargs="+", default=["cpu"])
    parser.add_argument(
        "--updates", nargs="+", default=["no", "yes"], choices=["no", "yes", "early"], help="with the optimizer or not"
    )
    parser.add_argument("--trace", type=Path, help="folder for a timeline of one more step each, for chrome://tracing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    total = torch.cuda.get_device_properties(0).total_memory
    tokens = torch.randint(0, args.vocabulary, (args.batch, args.seq), device=DEVICE)
    lines = [
        f"Llama shape {args.size}, {args.batch} x {args.seq} tokens, activations recomputed.",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; offload other than none: under {args.cap}.",
        "",
        "| offload | update | tokens/s | of resident | loss | GPU GB | RSS GB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]

    resident: Run | None = None
    for offload in ("none", *args.offload):
        for update in args.updates if resident else ["no"]:
            run = measure(args, tokens, offload, update)
            gc.collect()
            torch.cuda.empty_cache()
            resident = resident or run
            lines.append(
                f"| {offload} | {update} | {run.tokens_per_s:,.0f} | {run.tokens_per_s / resident.tokens_per_s:.1%} | "
                f"{run.loss:.3f} | {run.gpu_gb:.1f} | {run.rss_gb:.1f} |"
            )
            print(lines[-1], flush=True)
            torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(args.cap) / total))
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
