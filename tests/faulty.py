"""What the tests of drives share: file systems of their own, files and calls that fail on purpose."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_lowmem.buffers import aligned
from hf_lowmem.files import PosixFile

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20

# Counts the calls on files named store.bin or data.bin, and lets the n-th and later ones fail or fall short, which it
# says. It hangs on every name that C libraries give these calls.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int count[2];

static int ours(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, "store.bin") != 0 || strstr(path, "data.bin") != 0;
}

/* FAULT_READ and FAULT_WRITE: "n:errno", or "n:short" for half of what is asked. Returns the bytes to ask for. */
static ssize_t asked(int writes, int fd, size_t length) {
    const char *fault = getenv(writes ? "FAULT_WRITE" : "FAULT_READ");
    if (!fault || !ours(fd)) return length;
    int at = atoi(fault), now = ++count[writes];
    const char *what = strchr(fault, ':') + 1;
    if (now < at) return length;
    if (!strcmp(what, "short")) {
        if (length <= 4096) return length;
        fprintf(stderr, "cut %zu\n", length);
        return length / 2 + 100;
    }
    errno = atoi(what);
    return -1;
}

#define CALL(name, writes, given, passed)                                              \
    ssize_t name(int fd, const struct iovec *iov, int n, off64_t offset given) {       \
        static ssize_t (*next)(int, const struct iovec *, int, off64_t given);         \
        if (!next) next = dlsym(RTLD_NEXT, #name);                                     \
        ssize_t length = asked(writes, fd, iov[0].iov_len);                            \
        if (length < 0) return -1;                                                     \
        struct iovec less = {iov[0].iov_base, (size_t)length / 512 * 512};             \
        ssize_t done = next(fd, &less, 1, offset passed);                              \
        return done;                                                                   \
    }
#define COMMA ,
CALL(preadv, 0, , )
CALL(preadv64, 0, , )
CALL(pwritev, 1, , )
CALL(pwritev64, 1, , )
CALL(preadv2, 0, COMMA int flags, COMMA flags)
CALL(preadv64v2, 0, COMMA int flags, COMMA flags)
CALL(pwritev2, 1, COMMA int flags, COMMA flags)
CALL(pwritev64v2, 1, COMMA int flags, COMMA flags)
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets calls fail, for LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return subprocess.run(
        # Python 3.12 warns of every fork of a process with threads, which is what some of these are about; and we do of
        # folders in RAM, where temporary files are there.
        [
            sys.executable,
            *["-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::RuntimeWarning", "-c"],
            code,
        ]
        + [str(argument) for argument in arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@contextlib.contextmanager
def mounted(folder: Path, nbytes: int, kind: str = "ext4", options: str = "loop") -> Iterator[Path]:
    """A small file system of one's own; skips where that is not allowed."""
    maker = shutil.which(f"mkfs.{kind}") or shutil.which(f"/usr/sbin/mkfs.{kind}")
    if sys.platform != "linux" or os.geteuid() != 0 or (kind != "tmpfs" and maker is None):
        pytest.skip(f"needs root and mkfs.{kind}")
    image, place = folder / "image", folder / "mounted"
    place.mkdir()
    source = "tmpfs"
    if kind != "tmpfs":
        with open(image, "wb") as file:
            file.truncate(nbytes)
        quiet = ["-q", "-m", "0", "-O", "^has_journal"] if kind == "ext4" else ["-q"]
        subprocess.run([maker, *quiet, image], check=True)
        source = str(image)
    done = subprocess.run(["mount", "-t", kind, "-o", options, source, place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


class FaultyFile(PosixFile):
    """A file whose calls can be made to fail, to fall short, or to wait."""

    reads: dict[int, object]
    writes: dict[int, object]

    def __init__(self, path: str | os.PathLike[str], create: bool) -> None:
        super().__init__(path, create)
        self.faults: dict[str, dict[int, object]] = {"read": {}, "write": {}, "sync": {}}
        self.calls = {"read": 0, "write": 0, "sync": 0}
        self.log: list[tuple[str, int, int]] = []
        self.go = threading.Event()
        self.go.set()
        self._counting = threading.Lock()

    def _fault(self, kind: str, offset: int = 0, nbytes: int = 0) -> object:
        with self._counting:
            self.calls[kind] += 1
            self.log.append((kind, offset, nbytes))
            fault = self.faults[kind].get(self.calls[kind])
        if kind == "write":
            assert self.go.wait(60)
        if isinstance(fault, OSError):
            raise fault
        return fault

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        fault = self._fault("read", offset, len(buffer))
        if isinstance(fault, int):
            return 0 if fault == 0 else super()._read_some(buffer[:fault], offset)
        return super()._read_some(buffer, offset)

    def _write_some(self, buffer: memoryview, offset: int) -> int:
        fault = self._fault("write", offset, len(buffer))
        if isinstance(fault, int):
            return 0 if fault == 0 else super()._write_some(buffer[:fault], offset)
        return super()._write_some(buffer, offset)

    def sync(self) -> None:
        self._fault("sync")
        super().sync()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultyFile]:
    """Stores that are made from now on have such files, which come into this list. No fault is set yet."""
    from hf_lowmem import store

    opened = []

    def open_faulty(path, nbytes, create=True, direct=True):
        file = FaultyFile(path, create)
        file.nbytes = nbytes
        if create:
            file.preallocate(nbytes)
        file.direct = file.go_direct(may_write=create)
        file.calls.update(read=0, write=0, sync=0)
        file.log.clear()
        opened.append(file)
        return file

    monkeypatch.setattr(store, "open_file", open_faulty)
    return opened


def filled(nbytes: int, value: int) -> torch.Tensor:
    """A buffer of which every 8 bytes are another number, and which tells by its first what it was filled with."""
    (buffer,) = aligned([nbytes])
    buffer.view(torch.int64).copy_(torch.arange(nbytes // 8) + value * 2**32)
    return buffer


def empty(nbytes: int) -> torch.Tensor:
    (buffer,) = aligned([nbytes])
    return buffer


def value_of(buffer: torch.Tensor) -> int:
    """What a buffer was filled with; -1 if it is not all of one."""
    values = buffer.view(torch.int64) - torch.arange(buffer.numel() // 8)
    first = int(values[0])
    return first // 2**32 if bool((values == first).all()) else -1


def descriptors() -> set[str]:
    """What this process has open, by name."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


# What the code of a process of its own begins with.
CHILD = """
import os, sys, signal, threading, time, torch
torch.set_num_threads(1)  # whose threads no fork has
from faulty import filled, empty, value_of
from hf_lowmem import files, store
from hf_lowmem.store import Store
N = 256 * 1024
KEYS = {"a": N, "b": N, "c": N}
def make(folder, **changes):
    return Store(folder, **{"extents": KEYS, "chunk": 64 * 1024, "identity": "model", **changes})
def put(s, step):
    for ticket in [s.write(key, filled(N, step), step) for key in KEYS]: ticket.wait()
"""
