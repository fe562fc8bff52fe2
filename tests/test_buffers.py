"""Buffers of exact sizes: aligned, bounded, given out once."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from hf_lowmem import buffers, memory
from hf_lowmem.buffers import BufferPool, aligned, as_memory
from hf_lowmem.drive_file import whole_blocks

MIB = 2**20


def test_sizes_are_exact_and_addresses_are_whole_pages() -> None:
    pool = BufferPool({5 * MIB + 4096: 2, 8192: 3}, pin=False)
    assert pool.nbytes == 2 * (5 * MIB + 4096) + 3 * 8192
    taken = [pool.acquire(size) for size in (5 * MIB + 4096, 5 * MIB + 4096, 8192, 8192, 8192)]
    spans = sorted((buffer.data_ptr(), buffer.data_ptr() + buffer.numel()) for buffer in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(buffer.data_ptr() % 4096 == 0 for buffer in taken)
    assert min(buffer.data_ptr() for buffer in taken[:2]) % memory.HUGE_PAGE == 0
    for value, buffer in enumerate(taken):
        buffer.fill_(value)
    assert [int(buffer.float().mean()) for buffer in taken] == [0, 1, 2, 3, 4]


def test_pinned_ones_are_the_arenas(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(memory, "_register", lambda base, start, nbytes: seen.append(nbytes))
    pool = BufferPool({4 * MIB: 2}, pin=True)
    assert seen == [8 * MIB]
    assert pool.acquire(4 * MIB).data_ptr() % 4096 == 0


def test_when_none_is_left_one_waits_for_the_next() -> None:
    pool = BufferPool({8192: 1}, pin=False)
    first = pool.acquire(8192)
    with pytest.raises(TimeoutError, match=r"none of the 1 buffers of 8192 bytes came back within 0.01 s"):
        pool.acquire(8192, timeout=0.01)
    threading.Timer(0.05, pool.release, [first]).start()
    assert pool.acquire(8192, timeout=10).data_ptr() == first.data_ptr()


def test_what_the_pool_has_not() -> None:
    pool = BufferPool({8192: 1}, pin=False)
    with pytest.raises(KeyError, match="no buffers of 4096 bytes; there are"):
        pool.acquire(4096)
    buffer = pool.acquire(8192)
    pool.release(buffer)
    with pytest.raises(ValueError, match="not given out"):
        pool.release(buffer)
    with pytest.raises(ValueError, match="not given out"):
        pool.release(torch.empty(8192, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"multiples of 4096 bytes, not \[100\]"):
        BufferPool({100: 1})


@pytest.mark.parametrize(
    "buffer",
    [
        aligned([8192])[0][1:],
        aligned([8192])[0][:100],
        aligned([8192])[0][:0],
        aligned([8192])[0].view(torch.int32),
        aligned([16384])[0][::2],
    ],
    ids=["address", "size", "empty", "dtype", "strided"],
)
def test_what_a_drive_cannot_take_is_refused(buffer) -> None:
    with pytest.raises(ValueError, match="take BufferPool's"):
        as_memory(buffer)


def test_a_tensors_bytes() -> None:
    (buffer,) = aligned([8192])
    view = as_memory(buffer)
    view[5] = 7
    assert buffer[5] == 7
    assert len(view) == 8192
    assert [whole_blocks(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert buffers.BLOCK == 4096
