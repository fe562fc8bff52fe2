"""``int4``'s engine on GPUs whose tensor cores multiply 4-bit integers, with its bits: int4.cu, compiled at run time.

These are the GPUs of compute capability 7.5 to 8.9. Hopper's tensor cores have no such instruction: the kernel runs
there all the same, emulated and slowly, which is good for comparing values and for nothing else.

Matrices are rotated and rounded by torch's own operations.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from . import nvrtc
from .int4 import ALIGNED, Rows4, check, rotated_back, rotated_rows, split_rows, turned_rows

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


def _aligned(codes: Tensor) -> bool:
    return codes.is_contiguous() and codes.data_ptr() % ALIGNED == 0


@functools.cache
def _kernels(device: torch.device) -> nvrtc.Kernels:
    return nvrtc.Kernels(_binary(torch.cuda.get_device_capability(device)), device)


@functools.cache
def _binary(capability: tuple[int, int]) -> bytes:
    return nvrtc.compiled(SOURCE.read_text(encoding="utf-8"), capability)
