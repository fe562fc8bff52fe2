"""Weights in 8 and 4 bits in Triton, with the bits of ``kernels.weights``.

Every value is read and written once, by a few wide accesses of each thread; the arithmetic between has to be short to
stay behind the memory. Rows of 8 bits that a program does not hold are read twice.

Nothing may be contracted into a fused operation, so all kernels are launched with ``enable_fp_fusion=False``. bf16 is
rounded in integers: Triton's interpreter would cut it off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8 import LEVELS, SMALLEST, UNIT
from .triton_kernel import signed
from .triton_rows import WHOLE, inverse_of, rounded, scale_of
from .weights import ROOM, WeightForm

TILE = 4096  # values of a program that needs no whole row
WARPS = 4  # of such a program


def encode(x: Tensor, form: WeightForm, codes: Tensor, scale: Tensor) -> None:
    """See ``weights.encode``; all is on a CUDA device, and contiguous."""
    if form.group is None:
        _write_rows(x, codes, scale, None)
        return
    groups, each = scale.numel(), TILE // form.group
    _encode_groups[(triton.cdiv(groups, each),)](
        x,
        codes,
        scale.view(torch.int16),
        groups,
        SMALLEST=SMALLEST,
        HALF=form.group // 2,
        GROUPS=each,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def decode(codes: Tensor, scale: Tensor, form: WeightForm, out: Tensor) -> None:
    """See ``weights.decode``; all is on a CUDA device, and contiguous."""
    to = out.view(torch.int16) if out.dtype is torch.bfloat16 else out
    if form.group is None:
        rows, columns = codes.shape
        block = min(triton.next_power_of_2(columns), TILE)
        each = TILE // block
        _decode_rows[(triton.cdiv(rows, each), triton.cdiv(columns, block))](
            codes, scale, to, rows, columns, ROWS=each, COLUMNS=block, num_warps=WARPS, enable_fp_fusion=False
        )
        return
    groups, each = scale.numel(), TILE // form.group
    _decode_groups[(triton.cdiv(groups, each),)](
        codes,
        scale.view(torch.int16),
        to,
        groups,
        HALF=form.group // 2,
        GROUPS=each,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def recode(x: Tensor, codes: Tensor, scale: Tensor, key: int) -> None:
    """See ``weights.recode``; all is on a CUDA device, and contiguous."""
    _write_rows(x, codes, scale, key)


def _write_rows(x: Tensor, codes: Tensor, scale: Tensor, key: int | None) -> None:
    rows, columns = codes.shape
    block = min(triton.next_power_of_2(columns), WHOLE)
    number = 0 if key is None else key
    _encode_rows[(rows,)](
        x,
        codes,
        scale,
        columns,
        signed(number),
        signed(number >> 32),
        AGAIN=key is not None,
        FITS=columns <= block,
        SMALLEST=SMALLEST,
        UNIT=UNIT,
        LEVELS=float(LEVELS),
        ROOM=ROOM,
        BLOCK=block,
        num_warps=max(1, min(16, block // 1024)),
        enable_fp_fusion=False,
    )


# -- of one value -------------------------------------------------------------------------------------------------
@triton.jit
def _nearest_bf16(x):
    """The bits of an fp32 value that are those of the bf16 nearest to it; of a NaN: of no meaning."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _narrow(x, known, out_ptr):
    """To the type of ``out_ptr``, which is int16 for bf16. Only where ``known`` is false may values be NaNs."""
    if out_ptr.dtype.element_ty == tl.int16:
        x = tl.where(known, _nearest_bf16(x), 0x7FC0)
    return x.to(out_ptr.dtype.element_ty)


@triton.jit
def _number(code, BASE: tl.constexpr):
    """Of a code of 8 bits or less: under the exponent of 2**23 it is what ends 2**23 + code. BASE is taken off."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - BASE


@triton.jit
def _dither(at, key_low, key_high):
    """Between -0.5 and 0.5, of the numbers of values in their weight: weights.recode."""
    x = at.to(tl.uint32) * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) ^ key_high.to(tl.uint32, bitcast=True)
    # 14 bits behind the point of a number of 1 .. 2: no conversion, which GPUs do at an eighth of the speed
    return (((x >> 9) & 0x7FFE00) | 0x3F800000).to(tl.float32, bitcast=True) - 1.499969482421875


# -- 8 bits -------------------------------------------------------------------------------------------------------
@triton.jit
def _magnitudes(x_ptr, at, columns):
    """The bits of magnitudes are in the order of the magnitudes, and those of a NaN the largest."""
    x = tl.load(x_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _row_codes(x, first, at, inverse, key_low, key_high, AGAIN: tl.constexpr):
    dither = x
    if AGAIN:
        dither = _dither(first + at, key_low, key_high)
    return rounded(x, inverse, dither, AGAIN)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _encode_rows(
    x_ptr,
    codes_ptr,
    scale_ptr,
    columns,
    key_low,
    key_high,
    AGAIN: tl.constexpr,
    FITS: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    LEVELS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row for each program. AGAIN: it has a scale already, and is rounded stochastically."""
    row = tl.program_id(0).to(tl.int64)
    first = row * columns
    at = tl.arange(0, BLOCK)
    there = at < columns
    x = tl.load(x_ptr + first + at, mask=there, other=0.0).to(tl.float32)
    tops = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if not FITS:
        for start in range(BLOCK, columns, BLOCK):
            tops = tl.maximum(tops, _magnitudes(x_ptr + first, start + at, columns))
    top = tl.max(tops, axis=0)
    scale = scale_of(top, SMALLEST, UNIT)
    if AGAIN:
        last = tl.load(scale_ptr + row)
        scale = tl.where(top.to(tl.float32, bitcast=True) <= last * LEVELS, last, scale * ROOM)
    tl.store(scale_ptr + row, scale)
    inverse = inverse_of(scale)
    codes = _row_codes(x, first, at, inverse, key_low, key_high, AGAIN)
    tl.store(codes_ptr + first + at, codes, mask=there)
    if not FITS:
        for start in range(BLOCK, columns, BLOCK):
            there = start + at < columns
            x = tl.load(x_ptr + first + start + at, mask=there, other=0.0).to(tl.float32)
            codes = _row_codes(x, first, start + at, inverse, key_low, key_high, AGAIN)
            tl.store(codes_ptr + first + start + at, codes, mask=there)


@triton.jit
def _decode_rows(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    at = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + at, mask=there, other=0)
    numbers = _number((codes.to(tl.int32) & 255) ^ 128, 8388736.0)
    tl.store(out_ptr + at, _narrow(numbers * scale[:, None], (scale == scale)[:, None], out_ptr), mask=there)


# -- 4 bits -------------------------------------------------------------------------------------------------------
@triton.jit
def _order(x):
    """With its sign behind its magnitude a value's bits are in the order in which it decides the scale."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits << 1) | (bits >> 31)


@triton.jit
def _nibble(x, inverse):
    """With 1.5 * 2**23 added, and the 8, a code is what the bits end with. Nothing is less than -8.04 units."""
    units = tl.minimum(x * inverse[:, None], 7.0)
    return (units + 12582920.0).to(tl.int32, bitcast=True) & 15


@triton.jit
def _encode_groups(
    x_ptr, codes_ptr, scale_ptr, groups, SMALLEST: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr
):
    """A thread has values of both halves of a group, and so whole bytes."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, HALF)
    there = (group < groups)[:, None]
    at = group[:, None] * (2 * HALF) + lane[None, :]
    low = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + at + HALF, mask=there, other=0.0).to(tl.float32)
    order = tl.max(tl.maximum(_order(low), _order(high)), axis=1)
    largest = (order >> 1).to(tl.float32, bitcast=True)
    scale = _nearest_bf16(largest * 0.125)
    width = (scale << 16).to(tl.float32, bitcast=True)
    usable = (width >= SMALLEST) & (largest < float("inf"))
    sign = tl.where((order & 1) == 0, -32768, 0)  # what is largest becomes -8
    scale = tl.where(usable, scale | sign, tl.where(largest < float("inf"), 0, 0x7FC0))
    tl.store(scale_ptr + group, scale.to(tl.int16), mask=group < groups)
    inverse = tl.where(usable, tl.math.div_rn(1.0, tl.where(usable, width, 1.0)), 0.0)
    inverse = tl.where(sign < 0, -inverse, inverse)
    codes = _nibble(low, inverse) | (_nibble(high, inverse) << 4)
    tl.store(codes_ptr + group[:, None] * HALF + lane[None, :], codes.to(tl.uint8), mask=there)


@triton.jit
def _decode_groups(codes_ptr, scale_ptr, out_ptr, groups, HALF: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, HALF)
    there = (group < groups)[:, None]
    codes = tl.load(codes_ptr + group[:, None] * HALF + lane[None, :], mask=there, other=0).to(tl.int32)
    word = tl.load(scale_ptr + group, mask=group < groups, other=0).to(tl.int32)
    scale = (word << 16).to(tl.float32, bitcast=True)[:, None]
    at = out_ptr + group[:, None] * (2 * HALF) + lane[None, :]
    known = scale == scale
    tl.store(at, _narrow(_number(codes & 15, 8388616.0) * scale, known, out_ptr), mask=there)
    tl.store(at + HALF, _narrow(_number((codes >> 4) & 15, 8388616.0) * scale, known, out_ptr), mask=there)
