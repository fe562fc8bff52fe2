"""How fast a store reads and writes a drive, and for how much CPU time, against fio on the same file system.

    python benchmarks/nvme.py --folder /mnt/ssd --rounds 7 --out nvme.md

Both move the same bytes in calls of the same size, so many at a time, past the page cache. They take turns, in
another order each round; medians. fio runs twice: as it is installed, and with its buffers in huge pages, as a
store's are, which is faster. What is written is random, and fio need not change it from call to call. "write" ends
when the drive has taken the bytes into its cache, "write, synced" when it has said that it keeps them. CPU time is
the process's own, user and system.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_lowmem.buffers import BufferPool
from hf_lowmem.files import filesystem
from hf_lowmem.store import Store

KINDS = ("read", "write", "write, synced", "mixed")
GB = 1e9
Result = tuple[float, float, float]  # MB/s; user and system seconds a GB


def fio(path: Path, args: argparse.Namespace, huge: bool, kind: str) -> Result:
    """One run of fio over the whole file."""
    command = [
        "fio",
        "--name=hf_lowmem",
        f"--filename={path}",
        "--ioengine=" + args.engine,
        "--direct=1",
        "--scramble_buffers=0",
        "--output-format=json",
        f"--bs={args.chunk}m",
        f"--iodepth={args.depth}",
        f"--size={args.extents * args.extent}m",
        "--rw=" + {"read": "read", "mixed": "rw"}.get(kind, "write"),
        *(["--end_fsync=1"] if kind == "write, synced" else []),
    ]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else None
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    nbytes = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    seconds = job["job_runtime"] / 1e3
    return nbytes / seconds / 1e6, *(job[part] / 100 * seconds / nbytes * GB for part in ("usr_cpu", "sys_cpu"))


def ours(store: Store, pool: BufferPool, args: argparse.Namespace, kind: str) -> Result:
    """The same by a store, from a pool of four buffers."""
    size = args.extent * 2**20
    keys, version = list(store.extents), max(store.version(key) or 0 for key in store.extents) + 1
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    tickets = []
    for number, key in enumerate(keys):
        buffer = pool.acquire(size)
        writes = number % 2 if kind == "mixed" else kind != "read"
        ticket = store.write(key, buffer, version) if writes else store.read(key, buffer)
        ticket.then(partial(pool.release, buffer))
        tickets.append(ticket)
    for ticket in tickets:
        ticket.wait()
    if kind == "write, synced":
        store.commit(version)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    gb = len(keys) * size / GB
    return gb / seconds * 1e3, (after.ru_utime - before.ru_utime) / gb, (after.ru_stime - before.ru_stime) / gb


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[Result]]]:
    """By contestant and kind, what each round gave."""
    size = args.extent * 2**20
    extents = {f"extent {i}": size for i in range(args.extents)}
    pool = BufferPool({size: 4}, pin=False)
    for buffer in [pool.acquire(size) for _ in range(4)]:
        buffer.random_()
        pool.release(buffer)
    path = folder / "fio.bin"
    plain = {"slots": 1, "threads_per_drive": args.depth, "chunk": args.chunk * 2**20}
    with Store(folder, extents, **plain) as store, Store(folder, extents, verify="always", **plain) as checking:
        contestants: dict[str, Callable[[str], Result]] = {
            "fio": partial(fio, path, args, False),
            "fio, huge pages": partial(fio, path, args, True),
            "store": partial(ours, store, pool, args),
            "store, verify=always": partial(ours, checking, pool, args),
        }
        for run in contestants.values():  # the first pass over a file takes longer
            run("write")
        found: dict[str, dict[str, list[Result]]] = {name: {kind: [] for kind in KINDS} for name in contestants}
        for number in range(args.rounds):
            names = list(contestants)[:: 1 if number % 2 else -1]
            for kind in KINDS:
                for name in names[number // 2 % 4 :] + names[: number // 2 % 4]:
                    found[name][kind].append(contestants[name](kind))
    return found


def table(found: dict[str, dict[str, list[Result]]]) -> str:
    lines = ["| | | MB/s (least to most) | of fio, huge pages | CPU s/GB, user | system |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for kind in KINDS:
        limit = statistics.median(rate for rate, _, _ in found["fio, huge pages"][kind])
        for name, kinds in found.items():
            rates, users, systems = zip(*kinds[kind], strict=True)
            rate = statistics.median(rates)
            lines.append(
                f"| {kind} | {name} | {rate:.0f} ({min(rates):.0f} to {max(rates):.0f}) | {rate / limit:.2f}x | "
                f"{statistics.median(users):.3f} | {statistics.median(systems):.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the drive that is measured")
    parser.add_argument("--extents", type=int, default=8)
    parser.add_argument("--extent", type=int, default=128, help="MiB of each")
    parser.add_argument("--chunk", type=int, default=16, help="MiB a call")
    parser.add_argument("--depth", type=int, default=4, help="calls at a time")
    parser.add_argument("--engine", default="io_uring", help="fio's")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="a file for the table")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed (apt-get install fio): there is nothing to compare with")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="hf_lowmem_bench_") as folder:
        kind = filesystem(folder)
        found = measure(args, Path(folder))
    text = (
        f"{args.extents} extents of {args.extent} MiB, calls of {args.chunk} MiB, {args.depth} at a time, {kind}; "
        f"{args.rounds} rounds.\n\n{table(found)}\n"
    )
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
