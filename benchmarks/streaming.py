"""How much of a model's speed streaming leaves: tokens/s under a GPU memory cap, against the resident model.

    python benchmarks/streaming.py --size 3.2b --cap 24GB --runs auto cpu cpu:forward --out streaming.md

A Llama shape with random weights, sequences of random tokens, activations recomputed. First the model resident on the
uncapped card, forward and backward, without any optimizer. Then each of the runs under the cap, with LowMemTrainer,
4-bit states and clipping at 1.0. A run is a value of `offload`, and after it, each behind a colon:

    forward      forward and backward alone, without an optimizer
    early        max_grad_norm=0: updated during backward
    int8         compute="int8"
    weights=F    weights=F, int8 or int4
    bare         master_bits=8: these weights alone
    activations  offload_activations=true
    micro=N      micro_batch_size=N
    parts=N      gradient_accumulation_steps=N, with N-ths of the batch

One process; the median of the steps behind the first ones, in which `auto` finds its place. RSS is the process's at the
end of a run, and at its peak within it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from hf_lowmem import LowMemConfig, LowMemTrainer, attach
from hf_lowmem.config import parse_bytes
from hf_lowmem.loss import use_chunked_loss

DEVICE = "cuda"
WARM_UP = 5  # steps
# A flag that later versions of transformers call otherwise.
FIELDS = {f.name for f in dataclasses.fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, tied
    "1.2b": (2048, 8192, 16, 32, 8, True),
    "3.2b": (3072, 8192, 28, 24, 8, True),
    "8.0b": (4096, 14336, 32, 32, 8, False),
}


def make_model(args: argparse.Namespace) -> Any:
    """Random bf16 weights, made on the GPU; with `--lora`, frozen beside adapters."""
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[args.size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        vocab_size=args.vocabulary,
        rope_theta=500000.0,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model.train()


@dataclass
class Run:
    """What one run gave: times in seconds, memory in GB (1e9 bytes)."""

    seconds: float
    loss: float
    gpu: float
    reserved: float
    rss: float
    rss_peak: float
    note: str = ""


def reset_peaks() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak of RSS begins anew


def result(times: list[float], loss: float, note: str = "") -> Run:
    rss = psutil.Process().memory_info().rss / 1e9
    peak = rss
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9
    gpu, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    return Run(statistics.median(times[WARM_UP:] or times), loss, gpu, reserved, rss, peak, note)


def settings_of(options: set[str]) -> dict[str, Any]:
    """Of a LowMemConfig."""
    return {
        "compute": "int8" if "int8" in options else "model",
        "weights": next((x.split("=")[1] for x in options if x.startswith("weights=")), "model"),
        "master_bits": 8 if "bare" in options else 24,
    }


def forward_and_backward(args: argparse.Namespace, tokens: torch.Tensor, offload: str, options: set[str]) -> Run:
    """Steps without an optimizer."""
    model = make_model(args)
    checkpointed = model.get_base_model() if args.lora else model
    enable = (
        getattr(checkpointed, "activation_checkpointing_enable", None) or checkpointed.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    attach(model, LowMemConfig(offload=offload, **settings_of(options)), DEVICE)
    use_chunked_loss(model)
    reset_peaks()
    times, loss = [], torch.zeros(())
    for _ in range(args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return result(times, loss.item())


class Clock(TrainerCallback):
    """The time between the ends of steps, and a timeline of one of them."""

    def __init__(self, trace: Path | None, last: int) -> None:
        self.ends: list[float] = []
        self.retries: list[int] = []  # so far, at these ends
        self.trace, self.last = trace, last
        self.profile: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        self.retries.append(torch.cuda.memory_stats().get("num_alloc_retries", 0) if DEVICE == "cuda" else 0)
        if self.profile is not None:
            self.profile.stop()
            assert self.trace is not None
            self.trace.parent.mkdir(parents=True, exist_ok=True)
            self.profile.export_chrome_trace(str(self.trace))
            self.profile = None
        elif self.trace is not None and state.global_step == self.last - 2:
            self.profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
            self.profile.start()
            self.ends.append(float("nan"))

    @property
    def times(self) -> list[float]:
        until = next((i for i, end in enumerate(self.ends) if end != end), len(self.ends))
        ends = self.ends[:until]
        return [end - start for start, end in itertools.pairwise(ends)]


class Repeated(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The rows of one batch, in their order, again and again."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            for row in self.tokens:
                yield {"input_ids": row, "labels": row}


class Quick(LowMemTrainer):
    """Remembers the loss of each step."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.latest = super().training_step(*args, **kwargs)
        return self.latest


for ours in (Quick, Clock):  # the optimizer waits for what may look at weights, as somebody's own code may
    ours.__module__ = "hf_lowmem.benchmarks"


def trained(args: argparse.Namespace, tokens: torch.Tensor, offload: str, options: set[str]) -> Run:
    """Steps of LowMemTrainer, always on the same batch."""
    name = "-".join([args.size, offload.replace("/", "of"), *sorted(options)]).replace("=", "")

    def number(option: str, default: Any) -> Any:
        return next((int(x.split("=")[1]) for x in options if x.startswith(f"{option}=")), default)

    clock = Clock(args.trace and args.trace / f"{name}.json", args.steps)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            optim="cpu_adam4bit",
            max_steps=args.steps,
            per_device_train_batch_size=args.batch // number("parts", 1),
            gradient_accumulation_steps=number("parts", 1),
            **{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
            max_grad_norm=0.0 if "early" in options else 1.0,
            learning_rate=1e-5,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=DEVICE == "cpu",
        )
        lowmem = LowMemConfig(
            offload=offload,
            gpu_memory=args.cap,
            offload_activations=True if "activations" in options else None,
            **settings_of(options),
            micro_batch_size=number("micro", None),
        )
        torch.cuda.set_per_process_memory_fraction(1.0)  # the cap is for training; a real model comes from a disk
        model = make_model(args)
        trainer = Quick(
            model=model, args=settings, train_dataset=Repeated(tokens.cpu()), lowmem=lowmem, callbacks=[clock]
        )
        reset_peaks()
        trainer.train()
    placement = trainer._placement
    note = f"offload={placement.plan.offload}" if placement is not None and placement.plan is not None else ""
    given_back = clock.retries[-1] - clock.retries[min(WARM_UP, len(clock.retries) - 1)]
    if given_back:  # by torch's allocator, which stops everything for that
        note += f", memory given back {given_back} times"
    return result(clock.times, trainer.latest.item(), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="3.2b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters on all linear layers; 0 trains in full")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cap", default="24GB", help="GPU memory that the runs may take")
    parser.add_argument("--runs", nargs="+", default=["cpu:forward", "cpu", "auto"])
    parser.add_argument("--trace", type=Path, help="folder for a timeline of one step each, for chrome://tracing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    total = torch.cuda.get_device_properties(0).total_memory
    tokens = torch.randint(0, args.vocabulary, (args.batch, args.seq), device=DEVICE)
    kind = f"LoRA of rank {args.lora}" if args.lora else "full fine-tuning"
    lines = [
        f"Llama shape {args.size}, {kind}, {args.batch} x {args.seq} tokens, activations recomputed.",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; all but the first row under {args.cap}.",
        "",
        "| run | tokens/s | of resident | seconds a step | loss | GPU GB (reserved) | RSS GB | its peak | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    resident: Run | None = None
    for name in ("none:forward", *args.runs):
        offload, *options = name.split(":")
        if "forward" in options:
            run = forward_and_backward(args, tokens, offload, set(options))
        else:
            run = trained(args, tokens, offload, set(options))
        reset_peaks()
        resident = resident or run
        lines.append(
            f"| {name} | {tokens.numel() / run.seconds:,.0f} | {resident.seconds / run.seconds:.1%} | "
            f"{run.seconds:.3f} | {run.loss:.3f} | {run.gpu:.1f} ({run.reserved:.1f}) | "
            f"{run.rss:.1f} | {run.rss_peak:.1f} | {run.note} |"
        )
        print(lines[-1], flush=True)
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(args.cap) / total))
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
