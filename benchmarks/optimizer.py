"""Parameters a second of the optimizer step on the CPU, against the optimizers that a user would take instead.

    python benchmarks/optimizer.py --out benchmarks/results/optimizer.md

All contestants that run at full size are timed in one process, one step each in turn, and compared by medians; the
machine's own memory bandwidth (copy, and a triad with streaming stores) is measured in the same rounds. torchao and
bitsandbytes are far slower on a CPU and get a smaller array.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from hf_lowmem.kernels import native
from hf_lowmem.optim import LowBitAdamW

SETTLE_S = 0.05  # OpenMP's threads go on spinning for a while after torch's step, on the cores that the next one needs
TENSOR = 8 * 2**20  # values of one tensor: a 2048 x 4096 matrix
REFERENCE = "torch AdamW(fused), fp32"


@dataclass
class Contestant:
    """Something to be timed.

    Args:
        prepare: called with the number of threads before each timing.
        step: what is timed.
        values: parameters (or floats of an array) that it treats.
        bytes_a_value: read and written, counted once each.
    """

    prepare: Callable[[int], None]
    step: Callable[[], object]
    values: int
    bytes_a_value: float


def parameters(n: int, dtype: torch.dtype) -> list[nn.Parameter]:
    params = []
    for start in range(0, n, TENSOR):
        p = nn.Parameter((torch.randn(min(TENSOR, n - start)) * 0.02).to(dtype))
        p.grad = (torch.randn(p.numel()) * 1e-3).to(dtype)
        params.append(p)
    return params


def ours(n: int, bits: int, check: bool = False) -> Contestant:
    optimizer = LowBitAdamW(parameters(n, torch.bfloat16), state_bits=bits, check_finite=check)

    def prepare(threads: int) -> None:
        torch.set_num_threads(threads)
        optimizer.threads = threads

    states = {4: 2 + 4 * 4 / 128, 8: 4 + 4 * 4 / 256, 32: 16}[bits]
    return Contestant(prepare, optimizer.step, n, 2 * 2 + 2 * 1 + 2 + 2 * check + states)


def torch_fused(n: int) -> Contestant:
    optimizer = torch.optim.AdamW(parameters(n, torch.float32), fused=True)
    return Contestant(torch.set_num_threads, optimizer.step, n, 28)


def deepspeed(n: int) -> Contestant:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(parameters(n, torch.float32))
    return Contestant(torch.set_num_threads, optimizer.step, n, 28)


def torchao(n: int, name: str) -> Contestant:
    import torchao.optim

    optimizer = getattr(torchao.optim, name)(parameters(n, torch.float32))
    return Contestant(torch.set_num_threads, optimizer.step, n, 12 + {"AdamW4bit": 2.1, "AdamW8bit": 4.1}[name])


def bitsandbytes(n: int) -> Contestant:
    import bitsandbytes

    optimizer = bitsandbytes.optim.AdamW8bit(parameters(n, torch.float32))
    return Contestant(torch.set_num_threads, optimizer.step, n, 12 + 4.1)


def bandwidth(n: int) -> dict[str, Contestant]:
    a, b, c = (torch.ones(n) for _ in range(3))
    threads = [1]

    def prepare(count: int) -> None:
        torch.set_num_threads(count)
        threads[0] = count

    return {
        "copy (torch)": Contestant(prepare, lambda: a.copy_(b), n, 8),
        "triad, streaming stores": Contestant(prepare, lambda: native.triad(a, b, c, 2.0, threads[0]), n, 12),
    }


def extra_memory(contestant: Contestant, threads: int) -> int:
    """Bytes by which the process grows at its highest while three steps run (sampled by the kernel: VmHWM)."""
    contestant.prepare(threads)
    contestant.step()
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        contestant.step()
    peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return peak * 1024 - before


def rate(contestants: dict[str, Contestant], threads: int, rounds: int) -> dict[str, float]:
    """Values a second of each, medians over rounds in which all take turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            contestant.prepare(threads)
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            contestant.step()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: contestants[name].values / statistics.median(found) for name, found in times.items()}


def peers(n: int) -> dict[str, Contestant]:
    """The slow ones, each left out with its reason where it does not run."""
    makers: dict[str, Callable[[], Contestant]] = {
        "torchao AdamW4bit": lambda: torchao(n, "AdamW4bit"),
        "torchao AdamW8bit": lambda: torchao(n, "AdamW8bit"),
        "bitsandbytes AdamW8bit": lambda: bitsandbytes(n),
    }
    found = {}
    for name, make in makers.items():
        if not importlib.util.find_spec(name.split()[0]):
            print(f"{name}: not installed", flush=True)
            continue
        try:
            contestant = make()
            contestant.prepare(1)
            contestant.step()
        except Exception as error:  # whatever a peer raises is a result: it does not run here
            print(f"{name}: does not run here: {type(error).__name__}: {error}", flush=True)
            continue
        found[name] = contestant
    return found


def report(threads: int, rates: dict[str, float], contestants: dict[str, Contestant]) -> str:
    triad = rates["triad, streaming stores"] * 12
    lines = [
        f"\n{threads} threads:\n",
        "| | G parameters/s | of fused fp32 | bytes a parameter | GB/s | of the triad |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in rates.items():
        moved = found * contestants[name].bytes_a_value
        is_memory = name in ("copy (torch)", "triad, streaming stores")
        speed = "" if is_memory else f"{found / 1e9:.3f}"
        ratio = "" if is_memory else f"{found / rates[REFERENCE]:.2f}x"
        lines.append(
            f"| {name} | {speed} | {ratio} | {contestants[name].bytes_a_value:.3f} | {moved / 1e9:.1f} | "
            f"{moved / triad:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cores = native.physical_cores()
    parser.add_argument("--values", type=int, default=200 * 2**20)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, max(1, cores // 2), cores}))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--peer-values", type=int, default=2**20, help="0 leaves torchao and bitsandbytes out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    n = args.values
    four = ours(n, 4)
    extra = extra_memory(four, args.threads[-1]) if os.path.exists("/proc/self/clear_refs") else None
    contestants = {
        REFERENCE: torch_fused(n),
        "LowBitAdamW 4-bit (default recipe)": four,
        "LowBitAdamW 4-bit, gradients checked": ours(n, 4, check=True),
        "LowBitAdamW 8-bit": ours(n, 8),
        "LowBitAdamW 32-bit": ours(n, 32),
        **bandwidth(n // 4),
    }
    if importlib.util.find_spec("deepspeed"):
        contestants["DeepSpeedCPUAdam, fp32"] = deepspeed(n)
    text = (
        f"{n / 1e6:.0f} M parameters in tensors of {TENSOR / 1e6:.1f} M, {args.rounds} rounds, medians. "
        f"{cores} physical cores ({platform.processor() or platform.machine()}), kernel {native.isa()}, torch "
        f"{torch.__version__}. LowBitAdamW: bf16 weights and gradients, 24-bit master, stochastic rounding.\n"
    )
    if extra is not None:
        text += f"Memory beyond weights, gradients and states during a 4-bit step: {extra / 2**20:.1f} MiB.\n"
    for threads in args.threads:
        text += report(threads, rate(contestants, threads, args.rounds), contestants)
    if args.peer_values:
        small = {
            REFERENCE: torch_fused(args.peer_values),
            "LowBitAdamW 4-bit (default recipe)": ours(args.peer_values, 4),
            **bandwidth(args.peer_values),
            **peers(args.peer_values),
        }
        text += f"\nWith {args.peer_values / 1e6:.1f} M parameters (the slow peers):\n"
        text += report(args.threads[-1], rate(small, args.threads[-1], min(args.rounds, 5)), small)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
