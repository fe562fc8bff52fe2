"""``BufferPool``: the host memory that a store reads into and writes from: so many buffers, of exact sizes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from .drive_file import BLOCK
from .memory import HUGE_PAGE, PAGE, PinnedArena, host_memory


def aligned(sizes: list[int]) -> list[Tensor]:
    """``uint8[size]`` each, in one piece of memory that begins at a huge page where it is large enough for some.

    A drive moves bytes from and to huge pages two to three times faster, with a quarter of the CPU time: pages are
    prepared for it one by one. All of it is resident afterwards, filled with zeros.
    """
    total = sum(sizes)
    page = HUGE_PAGE if total >= 2 * HUGE_PAGE else PAGE
    base = host_memory(total + page)
    start = -base.data_ptr() % page
    base[start : start + total].zero_()
    return list(base[start : start + total].split(sizes))


def as_memory(buffer: Tensor) -> memoryview:
    """A tensor's bytes, which stay valid only as long as the tensor.

    Raises: ValueError unless it is contiguous ``uint8[n]`` in host memory, n > 0 and its address multiples of 4096.
    """
    right_kind = buffer.dtype == torch.uint8 and buffer.device.type == "cpu" and buffer.is_contiguous()
    if not right_kind or not buffer.numel() or buffer.numel() % BLOCK or buffer.data_ptr() % BLOCK:
        raise ValueError(
            f"a buffer for a drive is contiguous uint8 in host memory, its size and address multiples of {BLOCK}; "
            f"this is {buffer.dtype} on {buffer.device}, {buffer.numel()} values at {buffer.data_ptr():#x}: "
            "take BufferPool's"
        )
    return memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())).cast("B")


class BufferPool:
    """Buffers of a few exact sizes, taken once. Any thread may acquire and release them.

    Args:
        sizes: how many buffers there are of each size in bytes; sizes are multiples of 4096.
        pin: whether a GPU copies from and to them; None: where there is one.

    Attributes:
        nbytes: of all buffers.
    """

    def __init__(self, sizes: Mapping[int, int], pin: bool | None = None) -> None:
        wrong = [size for size in sizes if size <= 0 or size % BLOCK]
        if wrong:
            raise ValueError(f"sizes of buffers are multiples of {BLOCK} bytes, not {wrong}")
        self._sizes = dict(sizes)
        self.nbytes = sum(size * count for size, count in sizes.items())
        pin = torch.cuda.is_available() if pin is None else pin
        self._arenas = []  # pinned memory is the arena's, not the tensors'
        self._free: dict[int, list[Tensor]] = {}
        for size, count in sizes.items():
            if pin:
                self._arenas.append(PinnedArena([size] * count))
            self._free[size] = list(self._arenas[-1].parts) if pin else aligned([size] * count)
        self._out: set[int] = set()  # addresses
        self._changed = threading.Condition()

    def acquire(self, nbytes: int, timeout: float | None = None) -> Tensor:
        """``uint8[nbytes]``, its contents undefined; waits until one is free.

        Args:
            nbytes: one of the pool's sizes.
            timeout: seconds; None waits for ever.

        Raises:
            KeyError: the pool has no buffers of this size.
            TimeoutError: none came back in time.
        """
        if nbytes not in self._free:
            raise KeyError(f"no buffers of {nbytes} bytes; there are {sorted(self._sizes)}")
        free = self._free[nbytes]
        with self._changed:
            if not self._changed.wait_for(lambda: free, timeout):
                raise TimeoutError(
                    f"none of the {self._sizes[nbytes]} buffers of {nbytes} bytes came back within {timeout} s: one "
                    "was not released, or the drive is slower than that"
                )
            buffer = free.pop()
            self._out.add(buffer.data_ptr())
            return buffer

    def release(self, buffer: Tensor) -> None:
        """Takes a buffer back. Raises: ValueError if it is not out, or not of this pool."""
        with self._changed:
            if buffer.data_ptr() not in self._out:
                raise ValueError(f"a buffer of {buffer.numel()} bytes is released that this pool has not given out")
            self._out.remove(buffer.data_ptr())
            self._free[buffer.numel()].append(buffer)
            self._changed.notify_all()
