"""``int8``'s matrices and products in Triton, with its bits: a launch quantises all rows, products are scaled in place.

Nothing may be contracted into a fused operation: the kernels are launched with ``enable_fp_fusion=False``, and integer
sums are exact in any order, so all tilings give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8 import SMALLEST, Rows
from .triton_kernel import after_draws, signed

CHUNK = 1024  # columns of a row that are there at one time
# Tiles (rows, columns, depth), warps and stages of a product that are tried for a shape, the first time it comes.
TILES = (
    (128, 256, 128, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 128, 128, 8, 3),
    (256, 128, 64, 8, 4),
    (128, 128, 128, 8, 4),
    (128, 128, 128, 4, 4),
    (64, 256, 128, 4, 4),
    (128, 64, 128, 4, 4),
    (64, 64, 128, 4, 4),
)


def quantize_rows(x: Tensor, column_scale: Tensor | None = None, key: int | None = None) -> Rows:
    """See ``int8.quantize_rows``; ``x`` is on a CUDA device, with any strides."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    scale = torch.zeros(rows, device=x.device)
    if codes.numel():
        number = 0 if key is None else key
        _quantize[rows, 1, 1](
            x,
            x if column_scale is None else column_scale,
            codes,
            scale,
            columns,
            x.stride(0),
            x.stride(1),
            signed(number),
            signed(number >> 32),
            SCALED=column_scale is not None,
            STOCHASTIC=key is not None,
            SMALLEST=SMALLEST,
            CHUNK=min(CHUNK, triton.next_power_of_2(columns)),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return Rows(codes, scale)


def product(a: Rows, b: Rows, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """See ``int8.product``; all on one CUDA device. Fastest where ``b``'s codes are contiguous, as ``a``'s."""
    (m, k), n = a.codes.shape, len(b.codes)
    out = torch.empty(m, n, dtype=dtype, device=a.codes.device)
    if not out.numel():
        return out

    def grid(settings: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, settings["ROWS"]) * triton.cdiv(n, settings["COLUMNS"]),)

    tensors = [out if x is None else x for x in (a.scale, b.scale, bias)]
    given = [x is not None for x in (a.scale, b.scale, bias)]
    sizes = (m, n, k, *a.codes.stride(), *b.codes.stride())
    _product[grid](a.codes, b.codes, *tensors, out, *sizes, *given, enable_fp_fusion=False)
    return out


@triton.jit
def _words(at, key_low, key_high):
    """16 random bits for the value of each number: codec.Noise.weight_words, value by value."""
    within = (at & 127).to(tl.int32)
    lane = ((at >> 7) * 16 + (within & 31) // 2).to(tl.uint32)
    x = lane * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) ^ key_high.to(tl.uint32, bitcast=True)
    second = after_draws(x, 1)
    third = after_draws(second, 1)
    draw = within // 32
    x = tl.where(draw == 0, x, tl.where(draw == 1, second, tl.where(draw == 2, third, after_draws(third, 1))))
    return tl.where((within & 1) == 0, x & 0xFFFF, x >> 16).to(tl.int32)


@triton.jit
def _wide(x_ptr, scale_ptr, at, columns, stride, SCALED: tl.constexpr):
    """A chunk of a row in fp32."""
    x = tl.load(x_ptr + at.to(tl.int64) * stride, mask=at < columns, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(scale_ptr + at, mask=at < columns, other=0.0)
    return x


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _quantize(
    x_ptr,
    column_scale_ptr,
    codes_ptr,
    scale_ptr,
    columns,
    row_stride,
    column_stride,
    key_low,
    key_high,
    SCALED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SMALLEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A row for each program: its largest magnitude, and then, read once more, its codes."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    within = tl.arange(0, CHUNK)
    most = tl.zeros((CHUNK,), tl.int32)  # magnitudes as the bits of floats are in order, and a NaN is the largest
    for start in range(0, columns, CHUNK):
        x = _wide(x_ptr, column_scale_ptr, start + within, columns, column_stride, SCALED)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.max(most, axis=0)
    finite = top < 0x7F800000
    largest = top.to(tl.float32, bitcast=True)
    largest = tl.where(finite & (largest >= SMALLEST), largest, 0.0)
    inverse = tl.where(largest > 0, tl.math.div_rn(127.0, tl.where(largest > 0, largest, 1.0)), 0.0)
    tl.store(scale_ptr + row, tl.where(finite, largest * 0.007874015748031496, float("nan")))
    for start in range(0, columns, CHUNK):
        at = start + within
        units = _wide(x_ptr, column_scale_ptr, at, columns, column_stride, SCALED) * inverse
        if STOCHASTIC:
            words = _words(row * columns + at, key_low, key_high)
            units = tl.floor(units + (words.to(tl.float32) + 0.5) * 1.52587890625e-05)
        else:  # adding 1.5 * 2**23 leaves the nearest integer, ties to even
            units = (units + 12582912.0) - 12582912.0
        units = tl.where(finite, tl.minimum(tl.maximum(units, -127.0), 127.0), 0.0)
        tl.store(codes_ptr + row * columns + at, units.to(tl.int8), mask=at < columns)


@triton.autotune(
    [triton.Config({"ROWS": r, "COLUMNS": c, "DEPTH": d}, num_warps=w, num_stages=s) for r, c, d, w, s in TILES],
    key=["m", "n", "k", "a_column", "b_column"],
)
@triton.jit
def _product(
    a_ptr,
    b_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    a_row,
    a_column,
    b_row,
    b_column,
    A_SCALED: tl.constexpr,
    B_SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of the result for each program; neighbours share rows and columns in the cache, eight tiles high."""
    high, wide = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    group = tl.program_id(0) // (8 * wide)
    first = group * 8
    size = tl.minimum(high - first, 8)
    within = tl.program_id(0) % (8 * wide)
    rows = (first + within % size) * ROWS + tl.arange(0, ROWS)
    columns = (within // size) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows beyond the last one are read from the first ones again, and not written.
    a_ptrs = a_ptr + (rows % m).to(tl.int64)[:, None] * a_row + depth[None, :] * a_column
    b_ptrs = b_ptr + (columns % n).to(tl.int64)[None, :] * b_row + depth[:, None] * b_column
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, k, DEPTH):
        left = k - start
        a = tl.load(a_ptrs, mask=depth[None, :] < left, other=0)
        b = tl.load(b_ptrs, mask=depth[:, None] < left, other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
        a_ptrs += DEPTH * a_column
        b_ptrs += DEPTH * b_column
    out = total.to(tl.float32)
    if A_SCALED:
        out *= tl.load(a_scale_ptr + rows, mask=rows < m, other=0.0)[:, None]
    if B_SCALED:
        out *= tl.load(b_scale_ptr + columns, mask=columns < n, other=0.0)[None, :]
    if BIAS:
        out += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    there = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :], out, mask=there)
