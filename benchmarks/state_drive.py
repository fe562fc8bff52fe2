"""What a step costs whose optimizer states and masters rest on a drive, against the same step in RAM.

    python benchmarks/state_drive.py --folder /mnt/ssd --parameters 400e6 --groups 16 --rounds 5

bf16 weights and gradients in RAM, 4-bit states and 24-bit masters. In turn, in one process: a step with states in RAM
and one with states on the drive, each until all of it is done; medians. The least that a step can take is what its
bytes take at the speeds that the drive has alone, measured beside it: one way after the other, and both at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import torch

from hf_lowmem import LowBitAdamW
from hf_lowmem.buffers import aligned
from hf_lowmem.plan import PASSING_STATES
from hf_lowmem.store import Store


def make(count: int, each: int) -> tuple[list[torch.nn.Parameter], LowBitAdamW]:
    params = []
    for number in range(count):
        p = torch.nn.Parameter(torch.full((each // 4096, 4096), 0.01 * (number + 1), dtype=torch.bfloat16))
        p.grad = torch.full_like(p, 1e-3)
        params.append(p)
    optimizer = LowBitAdamW(params, lr=1e-5)
    optimizer.defer([[p] for p in params])
    return params, optimizer


def seconds(optimizer: LowBitAdamW) -> tuple[float, float]:
    """Of one step, and of the process's CPU time in it."""
    start, cpu = time.perf_counter(), sum(os.times()[:2])
    optimizer.step()
    optimizer.synchronize()
    return time.perf_counter() - start, sum(os.times()[:2]) - cpu


def bandwidth(folder: Path, size: int, count: int = 8) -> tuple[float, float]:
    """GB/s of reading and of writing extents of this size, one after another."""
    with Store(folder, {str(i): size for i in range(count)}, slots=1) as store:
        buffers = aligned([size] * 2)
        found = []
        for work in (lambda i, b: store.write(str(i), b, 1), lambda i, b: store.read(str(i), b)):
            start, tickets = time.perf_counter(), []
            for i in range(count):
                if i >= 2:
                    tickets[i - 2].wait()
                tickets.append(work(i, buffers[i % 2]))
            for ticket in tickets:
                ticket.wait()
            found.append(count * size / (time.perf_counter() - start) / 1e9)
    return found[1], found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--parameters", type=float, default=400e6)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    each = int(args.parameters / args.groups) // 4096 * 4096
    _, in_ram = make(args.groups, each)
    _, on_drive = make(args.groups, each)
    places = partial(Store, args.folder, slots=1)
    on_drive.use_drive(places, range(args.groups), lambda nbytes: aligned([nbytes])[0], PASSING_STATES)
    for optimizer in (in_ram, on_drive):
        seconds(optimizer)  # makes the states
    held = in_ram.nbytes()
    moved = (held["states"] + held["master"]) / 1e9
    times: dict[str, list[tuple[float, float]]] = {"RAM": [], "drive": []}
    speeds = []
    for _ in range(args.rounds):
        times["RAM"].append(seconds(in_ram))
        times["drive"].append(seconds(on_drive))
        speeds.append(bandwidth(args.folder, max(4096, int(moved * 1e9 / args.groups) // 4096 * 4096)))
    read, write = (statistics.median(s[i] for s in speeds) for i in (0, 1))
    on_drive.leave_drive()
    median = {name: statistics.median(t for t, _ in found) for name, found in times.items()}
    cpu = {name: statistics.median(c for _, c in found) for name, found in times.items()}
    alone = f"{read:.2f} GB/s read, {write:.2f} GB/s written"
    least = f"{moved / read + moved / write:.2f} | {max(moved / read, moved / write):.2f}"
    lines = [
        f"{args.groups} groups of {each / 1e6:.1f} M parameters; {moved:.2f} GB of states and masters, each way.",
        f"The drive alone: {alone}, by the same store. RSS {psutil.Process().memory_info().rss / 1e9:.2f} GB.",
        "",
        "| states in | seconds a step | CPU seconds | the drive's least, one way after the other | both at once |",
        "| --- | --- | --- | --- | --- |",
        f"| RAM | {median['RAM']:.2f} | {cpu['RAM']:.2f} | | |",
        f"| files | {median['drive']:.2f} | {cpu['drive']:.2f} | {least} |",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
