"""Host memory that a GPU copies from and to at full speed, and how torch's allocator takes the GPU's own.

torch's caching allocator for pinned memory rounds every request up to a power of two. Here ordinary memory is
registered with the driver at its exact size.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import sys
import warnings
import weakref
from pathlib import Path

import torch
from torch import Tensor

PAGE = 4096
HUGE_PAGE = 2 * 2**20
ALIGN = 256


def ram_bytes() -> int:
    """Bytes of RAM that this process can have at the very most: the machine's, or its container's limit."""
    import psutil  # Accelerate needs it, so it is there where models are trained

    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # another system, or "max"
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


def trim() -> None:
    """Gives freed memory back to the system. glibc keeps it, and cannot always use it again for aligned memory of the
    same size: a cast model of tensors under 32 MiB leaves a third of its bytes in such holes.
    """
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if malloc_trim is not None:
            malloc_trim(0)


@functools.cache
def use_expandable_segments() -> bool:
    """Has torch take a GPU's memory in segments that grow, between whose tensors little of it is lost.

    Nothing is changed where the environment says otherwise, and on Windows and WSL, where torch has no such segments.

    Returns: whether it takes memory so.
    """
    said = next(filter(None, (os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))), "")
    words = said.lower().replace(" ", "")
    if "expandable_segments:" in words:
        return "expandable_segments:true" in words
    if "backend:" in words or sys.platform != "linux" or "microsoft" in platform.release().lower():
        return False
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None
    )
    if change is None:
        return False
    try:
        change(",".join(filter(None, (said, "expandable_segments:True"))))  # what is not named falls to its default
    except (RuntimeError, ValueError):
        return False
    return True


class PinnedArena:
    """One block of pinned host memory, cut into tensors.

    Where the driver refuses to pin (a container's or WSL's limit), the memory stays ordinary: copies then run at a
    fraction of the link's speed and hold up the caller; one warning says so.

    Args:
        sizes: bytes of each tensor.

    Attributes:
        parts: ``uint8[size]`` for each size, aligned to 256 bytes.
        pinned: whether the driver took it.
    """

    def __init__(self, sizes: list[int]) -> None:
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // ALIGN) * ALIGN
        page = HUGE_PAGE if total >= 2 * HUGE_PAGE else PAGE
        base = host_memory(total + page)
        start = -base.data_ptr() % page
        self.nbytes = total
        self.pinned = total > 0 and _register(base, start, total)
        if self.pinned:
            # The finalizer's reference keeps the memory until the driver has let go of it.
            weakref.finalize(self, _unregister, base, start)
        self.parts: list[Tensor] = [base[start + o : start + o + n] for o, n in zip(offsets, sizes, strict=True)]


def host_memory(nbytes: int) -> Tensor:
    """Memory of which nothing is resident yet, in huge pages where the system has them: these are pinned many times
    faster than a page of 4 KiB at a time.
    """
    if nbytes >= 2 * HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the mapping
    return torch.empty(nbytes, dtype=torch.uint8)


def _register(base: Tensor, start: int, nbytes: int) -> bool:
    code = int(torch.cuda.cudart().cudaHostRegister(base.data_ptr() + start, nbytes, 0))
    if code:
        _forget_error()
        warnings.warn(
            f"the driver refused to pin {nbytes / 2**30:.2f} GiB of host memory (CUDA error {code}): copies to and "
            "from the GPU will be several times slower. Raise the limit (ulimit -l unlimited; on WSL the memory of the "
            "virtual machine) or lower staging_memory.",
            RuntimeWarning,
            stacklevel=3,
        )
    return code == 0


def _forget_error() -> None:
    """The driver keeps a refusal as its last error, and the next launch would be blamed for it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.zeros(1, device="cuda")  # raises again where it was not the refusal


def _unregister(base: Tensor, start: int) -> None:
    torch.cuda.synchronize()  # a copy from or to this memory may still run
    torch.cuda.cudart().cudaHostUnregister(base.data_ptr() + start)
