"""``int4``'s engine on GPUs whose tensor cores multiply 4-bit integers, with its bits: int4.cu, compiled at run time.

These are the GPUs of compute capability 7.5 to 8.9. Hopper's tensor cores have no such instruction: the kernel runs
there all the same, emulated and slowly, which is good for comparing values and for nothing else.

Gradients are rounded, and codes turned round, by torch's own operations; so is everything of rows that are too long for
a multiprocessor's shared memory.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from . import int4, nvrtc
from .int4 import ALIGNED, Rows4, check, packed, rotation, split_rows

__all__ = ["able", "product", "rotated_back", "rotated_rows", "split_rows", "turned_rows"]

SOURCE = Path(__file__).with_name("int4.cu")
FIRST, LAST = (7, 5), (8, 9)  # compute capabilities
TILE, THREADS = 128, 256
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


EMULATED = False  # tests and benchmarks only: whether GPUs may be used that emulate the instruction


def able(capability: tuple[int, int]) -> bool:
    """Whether the tensor cores of GPUs of a compute capability multiply 4-bit integers."""
    return FIRST <= capability <= LAST or (EMULATED and capability > LAST)


@torch.no_grad()
def product(a: Rows4, b: Rows4, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """See ``int4.product``; all on one CUDA device."""
    check(a, b)
    (digits, m, row_bytes), n = a.codes.shape, b.codes.shape[1]
    device = a.codes.device
    if dtype not in KINDS:
        return product(a, b, torch.float32, bias).to(dtype)
    out = torch.empty(m, n, dtype=dtype, device=device)
    if not out.numel():
        return out
    codes = [x.codes if _aligned(x.codes) else x.codes.clone(memory_format=torch.contiguous_format) for x in (a, b)]
    scales = [None if x is None else x.float().contiguous() for x in (a.scale, b.scale, bias)]
    blocks = -(-m // TILE) * -(-n // TILE)
    sizes = (m, n, row_bytes, digits, KINDS[dtype])
    _kernels(device).launch("int4_product", blocks, THREADS, 0, *codes, *scales, out, *sizes)
    return out


@torch.no_grad()
def rotated_rows(x: Tensor) -> tuple[Rows4, Tensor]:
    """See ``int4.rotated_rows``."""
    if not _fits(x):
        return int4.rotated_rows(x)
    rows, columns = x.shape
    row_bytes = -(-columns // (2 * ALIGNED)) * ALIGNED
    codes = torch.empty(1, rows, row_bytes, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, device=x.device)
    sizes = (columns, row_bytes, *_rotation(columns), KINDS[x.dtype])
    _kernels(x.device).launch("int4_rotated_rows", rows, THREADS, 4 * columns, x.contiguous(), codes, scale, *sizes)
    return Rows4(codes, scale, columns), scale


def turned_rows(x: Tensor) -> Rows4:
    """See ``int4.turned_rows``."""
    rows, _ = rotated_rows(x)
    return packed(rows.values().t()[None], None)


@torch.no_grad()
def rotated_back(x: Tensor) -> Tensor:
    """See ``int4.rotated_back``."""
    if not _fits(x):
        return int4.rotated_back(x)
    x, (rows, columns) = x.contiguous(), x.shape
    out = torch.empty_like(x)
    sizes = (columns, *_rotation(columns), KINDS[x.dtype])
    _kernels(x.device).launch("int4_rotated_back", rows, THREADS, 4 * columns, x, out, *sizes)
    return out


def _rotation(columns: int) -> tuple[int, int, int]:
    neighbours, pieces = rotation(columns)
    return neighbours, pieces, math.isqrt(neighbours * pieces)


def _fits(x: Tensor) -> bool:
    """Whether a row, in fp32, has room in shared memory beside what else a block needs."""
    properties = torch.cuda.get_device_properties(x.device)
    room = getattr(properties, "shared_memory_per_block_optin", nvrtc.SHARED)
    return x.dtype in KINDS and x.numel() > 0 and 4 * x.shape[1] <= room - 1024


def _aligned(codes: Tensor) -> bool:
    return codes.is_contiguous() and codes.data_ptr() % ALIGNED == 0


@functools.cache
def _kernels(device: torch.device) -> nvrtc.Kernels:
    return nvrtc.Kernels(_binary(torch.cuda.get_device_capability(device)), device)


@functools.cache
def _binary(capability: tuple[int, int]) -> bytes:
    return nvrtc.compiled(SOURCE.read_text(encoding="utf-8"), capability)
