"""``int8``'s matrices in Triton, with its bits: rows, columns, both in one pass, turned round, and rotated rows.

A row that fits a program is read once. All else takes two passes over tiles: the largest magnitudes, by atomic maxima
of the bits of floats, which are exact in any order; then the codes, as they lie, turned round, or both ways.
Nothing may be contracted into a fused operation, so all kernels are launched with ``enable_fp_fusion=False``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8 import SMALLEST, UNIT, Rows, pieces
from .triton_kernel import signed

WHOLE = 16384  # columns of a row up to which a program holds it
TOPS = (256, 64, 4)  # rows and columns of a tile in the first pass, and warps
CODES = (64, 128, 4)  # the same in the second
ALIGNED = 16  # bytes that a row of codes begins at a multiple of: the copy engine takes no others


def quantize_rows(
    x: Tensor, column_scale: Tensor | None = None, key: int | None = None, groups: Tensor | None = None
) -> Rows:
    """See ``int8.quantize_rows``; ``x`` is on a CUDA device, with any strides."""
    rows, columns = x.shape
    if groups is not None and (columns > WHOLE or x.stride(1) != 1):
        assert column_scale is not None
        x, column_scale, groups = x * column_scale[groups], None, None
    if columns > WHOLE or x.stride(1) != 1:
        tops = _largest(x, column_scale, by_row=True)[0]
        codes, scale, _, _ = _write(x, column_scale, key, tops, None, turned=False)
        return Rows(codes, scale)
    codes, scale = _codes(rows, columns, x.device), _scales(x, rows)
    if codes.numel():
        block = max(4, triton.next_power_of_2(columns))
        _whole_rows[(rows,)](
            x,
            x if column_scale is None else column_scale,
            x if groups is None else groups,
            codes,
            scale,
            columns,
            x.stride(0),
            codes.stride(0),
            *_halves(key),
            SCALED=column_scale is not None,
            GROUPED=groups is not None,
            STOCHASTIC=key is not None,
            SMALLEST=SMALLEST,
            UNIT=UNIT,
            BLOCK=block,
            num_warps=max(1, min(16, block // 1024)),
            enable_fp_fusion=False,
        )
    return Rows(codes, scale)


def rotated_rows(x: Tensor) -> tuple[Rows, Tensor]:
    """See ``int8.rotated_rows``."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    number = pieces(columns)
    codes = _codes(rows, columns, x.device)
    scales = _scales(x, 2, rows)
    if codes.numel():
        length = columns // number
        block = triton.next_power_of_2(length)
        _rotated_rows[(rows,)](
            x,
            codes,
            scales,
            rows,
            length,
            x.stride(0),
            codes.stride(0),
            PIECES=number,
            ROOT=1 / math.isqrt(number),
            SMALLEST=SMALLEST,
            UNIT=UNIT,
            BLOCK=block,
            num_warps=max(1, min(16, block * number // 2048)),
            enable_fp_fusion=False,
        )
    return Rows(codes, scales[0]), scales[1]


def quantize_columns(x: Tensor, key: int | None = None) -> Rows:
    """See ``int8.quantize_columns``."""
    tops = _largest(x, None, by_column=True)[1]
    _, _, turned, scale = _write(x, None, key, None, tops, natural=False)
    return Rows(turned, scale)


def quantize_both(x: Tensor, column_scale: Tensor | None = None, key: int | None = None) -> tuple[Rows, Rows]:
    """See ``int8.quantize_both``."""
    row_tops, column_tops = _largest(x, column_scale, by_row=True, by_column=True)
    codes, scale, turned, turned_scale = _write(x, column_scale, key, row_tops, column_tops)
    return Rows(codes, scale), Rows(turned, turned_scale)


def turned_codes(x: Tensor, scale: Tensor) -> Tensor:
    """See ``int8.turned_codes``."""
    turned: Tensor = _write(x, None, None, scale, None, natural=False)[2]
    return turned


# -- launches -----------------------------------------------------------------------------------------------------
def _codes(rows: int, columns: int, device: torch.device) -> Tensor:
    """Room for codes, every row of it aligned."""
    wide = -(-columns // ALIGNED) * ALIGNED
    return torch.empty(rows, wide, dtype=torch.int8, device=device)[:, :columns]


def _scales(x: Tensor, *shape: int) -> Tensor:
    """Room for scales. A kernel writes all of them, but for an empty ``x``, for which there is none."""
    return torch.empty(shape, device=x.device) if x.numel() else torch.zeros(shape, device=x.device)


def _halves(key: int | None) -> tuple[int, int]:
    number = 0 if key is None else key
    return signed(number), signed(number >> 32)


def _tiles(x: Tensor, tile: tuple[int, int, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of a launch, and its settings."""
    rows, columns, warps = tile
    grid = triton.cdiv(x.shape[0], rows), triton.cdiv(x.shape[1], columns)
    return grid, {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}


def _largest(
    x: Tensor, column_scale: Tensor | None, by_row: bool = False, by_column: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The bits of the largest magnitude of each row, scaled, and of each column, not scaled."""
    rows, columns = x.shape[0] * by_row, x.shape[1] * by_column
    both = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)
    tops = (both[:rows] if by_row else None, both[rows:] if by_column else None)
    if x.numel():
        grid, settings = _tiles(x, TOPS)
        _tops[grid](
            x,
            x if column_scale is None else column_scale,
            *(x if t is None else t for t in tops),
            *x.shape,
            *x.stride(),
            SCALED=column_scale is not None,
            BY_ROW=by_row,
            BY_COLUMN=by_column,
            **settings,
            enable_fp_fusion=False,
        )
    return tops


def _write(
    x: Tensor,
    column_scale: Tensor | None,
    key: int | None,
    by_row: Tensor | None,
    by_column: Tensor | None,
    natural: bool = True,
    turned: bool = True,
) -> tuple[Any, Any, Any, Any]:
    """Codes as they lie, with a scale for each row, and codes turned round, with one for each column, or for each row
    where there is none of columns. Scales are given as floats, or as the bits of the largest magnitudes.
    """
    rows, columns = x.shape
    lying = _codes(rows, columns, x.device) if natural else None
    standing = _codes(columns, rows, x.device) if turned else None
    scales = [_scales(x, len(t)) if t is not None and t.dtype is torch.int32 else t for t in (by_row, by_column)]
    if x.numel():
        grid, settings = _tiles(x, CODES)
        _codes_of_tiles[grid](
            x,
            x if column_scale is None else column_scale,
            *(x if t is None else t for t in (by_row, by_column, *scales, lying, standing)),
            rows,
            columns,
            *x.stride(),
            0 if lying is None else lying.stride(0),
            0 if standing is None else standing.stride(0),
            *_halves(key),
            SCALED=column_scale is not None,
            STOCHASTIC=key is not None,
            BY_ROW=by_row is not None,
            BY_COLUMN=by_column is not None,
            FROM_TOPS=any(t is not None and t.dtype is torch.int32 for t in (by_row, by_column)),
            LYING=natural,
            STANDING=turned,
            SMALLEST=SMALLEST,
            UNIT=UNIT,
            **settings,
            enable_fp_fusion=False,
        )
    return lying, scales[0], standing, scales[1]


# -- of one value -------------------------------------------------------------------------------------------------
@triton.jit
def scale_of(top, SMALLEST: tl.constexpr, UNIT: tl.constexpr):
    """What a unit is worth, of the bits of the largest magnitude."""
    largest = top.to(tl.float32, bitcast=True)
    scale = tl.where(largest >= SMALLEST, largest * UNIT, 0.0)
    return tl.where(top < 0x7F800000, scale, float("nan"))


@triton.jit
def inverse_of(scale):
    """0 where the codes are."""
    usable = scale > 0
    return tl.where(usable, tl.math.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def _dither(row, quad, quads, key_low, key_high):
    """Of each four columns in each row, its four values by two and two: int8.dither."""
    at = (row * quads).to(tl.uint32)[:, None] + quad.to(tl.uint32)[None, :]
    x = at * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) ^ key_high.to(tl.uint32, bitcast=True)
    # 8 bits behind the point of a number of 1 .. 2: no conversion, which GPUs do at an eighth of the speed
    first, second = (x << 15) & 0x7F8000, (x << 7) & 0x7F8000
    third, fourth = (x >> 1) & 0x7F8000, (x >> 9) & 0x7F8000
    bits = tl.join(tl.join(first, third), tl.join(second, fourth)) | 0x3F800000
    return bits.to(tl.float32, bitcast=True) - 1.498046875


@triton.jit
def rounded(x, inverse, dither, STOCHASTIC: tl.constexpr):
    """Codes of values; of no meaning where the scale is a NaN."""
    units = x * inverse
    if STOCHASTIC:
        units = units + dither
    # With 1.5 * 2**23 added, the last bits are the nearest integer, ties to even: no conversion here either.
    return (units + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


# -- kernels ------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["key_low", "key_high"])
def _whole_rows(
    x_ptr,
    column_scale_ptr,
    groups_ptr,
    codes_ptr,
    scale_ptr,
    columns,
    stride,
    codes_stride,
    key_low,
    key_high,
    SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row for each program."""
    row = tl.program_id(0).to(tl.int64)
    if GROUPED:
        column_scale_ptr += tl.load(groups_ptr + row) * columns
    at = tl.arange(0, BLOCK)
    there = at < columns
    x = tl.load(x_ptr + row * stride + at, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(column_scale_ptr + at, mask=there, other=0.0)
    scale = scale_of(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0), SMALLEST, UNIT)
    tl.store(scale_ptr + row, scale)
    dither = x
    if STOCHASTIC:
        quad = tl.arange(0, BLOCK // 4)
        dither = _dither(row + tl.arange(0, 1), quad, (columns + 3) // 4, key_low, key_high)
        dither = tl.reshape(dither, (BLOCK,))
    codes = rounded(x, inverse_of(scale), dither, STOCHASTIC)
    tl.store(codes_ptr + row * codes_stride + at, codes, mask=there)


@triton.jit
def _added_and_subtracted(xs, STEP: tl.constexpr, PIECES: tl.constexpr):
    out = ()
    for i in tl.static_range(PIECES):
        if (i // STEP) % 2 == 0:
            out += (xs[i] + xs[i + STEP],)  # type: ignore[assignment]
        else:
            out += (xs[i - STEP] - xs[i],)  # type: ignore[assignment]
    return out


@triton.jit
def _top(xs, PIECES: tl.constexpr):
    top = xs[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, PIECES):
        top = tl.maximum(top, xs[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(top, axis=0)


@triton.jit
def _rotated_rows(
    x_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    length,
    stride,
    codes_stride,
    PIECES: tl.constexpr,
    ROOT: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row for each program, its pieces one beside the other: a thread adds and subtracts what it has itself."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < length
    xs = ()
    for i in tl.static_range(PIECES):
        x = tl.load(x_ptr + row * stride + i * length + at, mask=there, other=0.0)
        xs += (x.to(tl.float32),)  # type: ignore[assignment]
    tl.store(scales_ptr + rows + row, scale_of(_top(xs, PIECES), SMALLEST, UNIT))
    for log in tl.static_range(6):
        if 2**log < PIECES:
            xs = _added_and_subtracted(xs, 2**log, PIECES)
    scale = scale_of(_top(xs, PIECES), SMALLEST, UNIT)
    tl.store(scales_ptr + row, scale * ROOT)
    inverse = inverse_of(scale)
    for i in tl.static_range(PIECES):
        tl.store(codes_ptr + row * codes_stride + i * length + at, rounded(xs[i], inverse, 0.0, False), mask=there)


@triton.jit
def _tile(x_ptr, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows and columns of a program's tile, which of them there are, and its values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    at = x_ptr + row[:, None] * row_stride + column[None, :] * column_stride
    return row, column, there, tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _tops(
    x_ptr,
    column_scale_ptr,
    row_tops_ptr,
    column_tops_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    SCALED: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The bits of magnitudes are in the order of the magnitudes, and those of a NaN the largest."""
    row, column, _there, x = _tile(x_ptr, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    if BY_COLUMN:
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
        tl.atomic_max(column_tops_ptr + column, top, mask=column < columns, sem="relaxed")
    if BY_ROW:
        if SCALED:
            x = x * tl.load(column_scale_ptr + column, mask=column < columns, other=0.0)[None, :]
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        tl.atomic_max(row_tops_ptr + row, top, mask=row < rows, sem="relaxed")


@triton.jit
def _given_scale(
    given_ptr, scale_ptr, at, there, writes, FROM_TOPS: tl.constexpr, SMALLEST: tl.constexpr, UNIT: tl.constexpr
):
    """The scales of rows or columns, of which one program of those that share them writes them."""
    given = tl.load(given_ptr + at, mask=there, other=0)
    if FROM_TOPS:
        given = scale_of(given, SMALLEST, UNIT)
        if writes:
            tl.store(scale_ptr + at, given, mask=there)
    return given


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _codes_of_tiles(
    x_ptr,
    column_scale_ptr,
    by_row_ptr,
    by_column_ptr,
    row_scale_ptr,
    turned_scale_ptr,
    lying_ptr,
    standing_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    lying_stride,
    standing_stride,
    key_low,
    key_high,
    SCALED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    FROM_TOPS: tl.constexpr,
    LYING: tl.constexpr,
    STANDING: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, there, x = _tile(x_ptr, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    dither = x
    if STOCHASTIC:
        quad = tl.program_id(1) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
        dither = tl.reshape(_dither(row, quad, (columns + 3) // 4, key_low, key_high), (ROWS, COLUMNS))
    if BY_COLUMN:
        first = tl.program_id(0) == 0
        scale = _given_scale(
            by_column_ptr, turned_scale_ptr, column, column < columns, first, FROM_TOPS, SMALLEST, UNIT
        )
        turned = rounded(x, inverse_of(scale)[None, :], dither, STOCHASTIC)
    if BY_ROW:
        if SCALED:
            x = x * tl.load(column_scale_ptr + column, mask=column < columns, other=0.0)[None, :]
        first = tl.program_id(1) == 0
        scale = _given_scale(by_row_ptr, row_scale_ptr, row, row < rows, first, FROM_TOPS, SMALLEST, UNIT)
        codes = rounded(x, inverse_of(scale)[:, None], dither, STOCHASTIC)
        if not BY_COLUMN:
            turned = codes
        if LYING:
            tl.store(lying_ptr + row[:, None] * lying_stride + column[None, :], codes, mask=there)
    if STANDING:
        at = standing_ptr + column[:, None] * standing_stride + row[None, :]
        tl.store(at, tl.trans(turned), mask=tl.trans(there))
