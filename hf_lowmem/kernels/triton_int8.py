"""``int8``'s engine in Triton, with its bits: products are scaled in place.

Nothing may be contracted into a fused operation: the kernels are launched with ``enable_fp_fusion=False``, and integer
sums are exact in any order, so all tilings give the same bits.
"""

from __future__ import annotations

import functools
import inspect
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8 import DEEPEST, Rows, check_depth, product_in_parts
from .triton_rows import ALIGNED, quantize_both, quantize_columns, quantize_rows, rotated_rows, turned_codes

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

__all__ = [
    "grouped_product",
    "product",
    "quantize_both",
    "quantize_columns",
    "quantize_rows",
    "rotated_rows",
    "turned_codes",
]

# Tiles (rows, columns, depth), warps and stages of a product. These are tried for a shape, the first time it comes.
TILES = (
    (128, 128, 128, 4, 3),
    (128, 128, 64, 4, 4),
    (128, 256, 64, 8, 3),
    (64, 128, 128, 4, 3),
    (64, 64, 128, 4, 4),
)
# With Hopper's copy engine. Two programs share a multiprocessor, and one computes while the other begins or ends: 1.2
# to 1.3 times as fast as larger tiles, which have less to fetch and leave no room for two.
COPIED = (128, 128, 128, 4, 3)
# Of a product by groups, whose sizes only the device knows; and where a multiprocessor has 100 KB of its own or less.
GROUPED, GROUPED_IN_LESS = (128, 128, 128, 4, 3), (128, 128, 64, 4, 4)


def product(a: Rows, b: Rows, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """See ``int8.product``; all on one CUDA device. Fastest where the codes of both are contiguous."""
    (m, k), n = a.codes.shape, len(b.codes)
    check_depth(a, b)
    if k > DEEPEST:
        return product_in_parts(product, a, b, dtype, bias)
    out = torch.empty(m, n, dtype=dtype, device=a.codes.device)
    if not out.numel():
        return out
    scales = [out if x is None else x for x in (a.scale, b.scale, bias)]
    given = [x is not None for x in (a.scale, b.scale, bias)]
    if _copy_engine(out.device) and all(_copyable(x) for x in (a.codes, b.codes, out)):
        _launch_copied(a.codes, b.codes, scales, out, given)
        return out

    def grid(settings: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, settings["ROWS"]) * triton.cdiv(n, settings["COLUMNS"]),)

    strides, sizes = (*a.codes.stride(), *b.codes.stride()), [(x - 1).bit_length() for x in (m, n, k)]
    _product[grid](a.codes, b.codes, *scales, out, m, n, k, *strides, *sizes, *given, enable_fp_fusion=False)
    return out


def grouped_product(a: Rows, codes: Tensor, scale: Tensor | None, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``int8.grouped_product``. The ends of the groups stay on the device; nothing waits for it."""
    (m, k), (groups, n, _) = a.codes.shape, codes.shape
    if k > DEEPEST:
        raise ValueError(f"sums of {k} products are too long for an int32: at most {DEEPEST} can be had of groups")
    out = torch.empty(m, n, dtype=dtype, device=a.codes.device)
    if not out.numel():
        return out
    rows, columns, depth, warps, stages = GROUPED if _copy_engine(out.device) else GROUPED_IN_LESS
    # A group's last tile may be half empty: there are at most so many.
    tiles = (triton.cdiv(m, rows) + groups) * triton.cdiv(n, columns)
    _grouped[(tiles,)](
        a.codes,
        codes,
        out if a.scale is None else a.scale,
        out if scale is None else scale,
        ends,
        out,
        n,
        k,
        groups,
        *a.codes.stride(),
        *codes.stride(),
        a.scale is not None,
        scale is not None,
        GROUPS=triton.next_power_of_2(groups),
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    return out


# -- by the copy engine ---------------------------------------------------------------------------------------------
@functools.cache
def _copy_engine(device: torch.device) -> bool:
    """Whether tiles are to be fetched by it."""
    return TensorDescriptor is not None and torch.cuda.get_device_capability(device)[0] == 9


def _copyable(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % ALIGNED == 0 and x.data_ptr() % ALIGNED == 0


def _launch_copied(a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor, given: list[bool]) -> None:
    rows, columns, depth, warps, stages = COPIED
    tiles = triton.cdiv(len(a), rows) * triton.cdiv(len(b), columns)
    _copied[(tiles,)](
        TensorDescriptor(a, list(a.shape), list(a.stride()), [rows, depth]),
        TensorDescriptor(b, list(b.shape), list(b.stride()), [columns, depth]),
        *scales,
        TensorDescriptor(out, list(out.shape), list(out.stride()), [rows, columns]),
        *out.shape,
        a.shape[1],
        *given,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )


# -- tuning -------------------------------------------------------------------------------------------------------
def _median(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    """Milliseconds of a call, three times over for Triton's autotuner. Its own way takes 256 MB of the GPU."""
    call()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return [statistics.median(times)] * 3


_known = inspect.signature(triton.autotune).parameters
_tuning = {"do_bench": _median, "cache_results": True}  # the table lies in Triton's own cache
_tuned = triton.autotune(
    [triton.Config({"ROWS": r, "COLUMNS": c, "DEPTH": d}, num_warps=w, num_stages=s) for r, c, d, w, s in TILES],
    key=["m_size", "n_size", "k_size", "a_column", "b_column"],
    **{name: value for name, value in _tuning.items() if name in _known},
)


# -- kernels ------------------------------------------------------------------------------------------------------
@triton.jit
def _place(number, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column of a tile; neighbours share rows and columns in the cache, eight tiles high."""
    high, wide = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    first = number // (8 * wide) * 8
    size = tl.minimum(high - first, 8)
    within = number % (8 * wide)
    return first + within % size, within // size


@triton.jit
def _scaled(
    total,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    rows,
    columns,
    m,
    n,
    A_SCALED: tl.constexpr,
    B_SCALED: tl.constexpr,
    BIAS: tl.constexpr,
):
    out = total.to(tl.float32)
    if A_SCALED:
        out *= tl.load(a_scale_ptr + rows, mask=rows < m, other=0.0)[:, None]
    if B_SCALED:
        out *= tl.load(b_scale_ptr + columns, mask=columns < n, other=0.0)[None, :]
    if BIAS:
        out += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def _sum(a_ptrs, b_ptrs, a_column, b_column, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Integer sums of a tile: pointers are to its first ``DEPTH`` columns of ``a``, and of ``b`` turned round."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, k, DEPTH):
        left = k - start
        a = tl.load(a_ptrs, mask=depth[None, :] < left, other=0)
        b = tl.load(b_ptrs, mask=depth[:, None] < left, other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
        a_ptrs += DEPTH * a_column
        b_ptrs += DEPTH * b_column
    return total


@triton.jit
def _copied(
    a_tiles,
    b_tiles,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_tiles,
    m,
    n,
    k,
    A_SCALED: tl.constexpr,
    B_SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of the result for each program. What is beyond an edge is read as zero, and not written."""
    row, column = _place(tl.program_id(0), m, n, ROWS, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, k, DEPTH):
        a = a_tiles.load([row * ROWS, start])
        b = b_tiles.load([column * COLUMNS, start])
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    out = _scaled(total, a_scale_ptr, b_scale_ptr, bias_ptr, rows, columns, m, n, A_SCALED, B_SCALED, BIAS)
    out_tiles.store([row * ROWS, column * COLUMNS], out.to(out_tiles.dtype))


@_tuned
@triton.jit(do_not_specialize=["m_size", "n_size", "k_size"])
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
    m_size,  # of these, by which tilings are known, there are few
    n_size,
    k_size,
    A_SCALED: tl.constexpr,
    B_SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of the result for each program."""
    row, column = _place(tl.program_id(0), m, n, ROWS, COLUMNS)
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows beyond the last one are read from the first ones again, and not written.
    a_ptrs = a_ptr + (rows % m).to(tl.int64)[:, None] * a_row + depth[None, :] * a_column
    b_ptrs = b_ptr + (columns % n).to(tl.int64)[None, :] * b_row + depth[:, None] * b_column
    total = _sum(a_ptrs, b_ptrs, a_column, b_column, k, ROWS, COLUMNS, DEPTH)
    out = _scaled(total, a_scale_ptr, b_scale_ptr, bias_ptr, rows, columns, m, n, A_SCALED, B_SCALED, BIAS)
    there = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :], out, mask=there)


@triton.jit
def _grouped(
    a_ptr,
    b_ptr,
    a_scale_ptr,
    b_scale_ptr,
    ends_ptr,
    out_ptr,
    n,
    k,
    groups,
    a_row,
    a_column,
    b_group,
    b_row,
    b_column,
    A_SCALED: tl.constexpr,
    B_SCALED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of a group's rows for each program; which, each finds in the ends of all groups."""
    wide = tl.cdiv(n, COLUMNS)
    number, column = tl.program_id(0) // wide, tl.program_id(0) % wide
    at = tl.arange(0, GROUPS)
    ends = tl.load(ends_ptr + at, mask=at < groups, other=0)
    starts = tl.load(ends_ptr + at - 1, mask=(at > 0) & (at < groups), other=0)
    tiles = tl.where(at < groups, (ends - starts + ROWS - 1) // ROWS, 0)
    behind = tl.cumsum(tiles, axis=0)
    group = tl.sum(((behind <= number) & (at < groups)).to(tl.int32), axis=0)
    if group < groups:
        mine = at == group
        start, end = tl.sum(tl.where(mine, starts, 0), axis=0), tl.sum(tl.where(mine, ends, 0), axis=0)
        first = tl.sum(tl.where(mine, behind - tiles, 0), axis=0)
        rows = start + (number - first) * ROWS + tl.arange(0, ROWS)
        columns = column * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        # Rows and columns beyond the last ones are read from the first ones again, and not written.
        a_rows = tl.where(rows < end, rows, start)
        a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * a_row + depth[None, :] * a_column
        b_ptrs = b_ptr + group.to(tl.int64) * b_group
        b_ptrs += (columns % n).to(tl.int64)[None, :] * b_row + depth[:, None] * b_column
        total = _sum(a_ptrs, b_ptrs, a_column, b_column, k, ROWS, COLUMNS, DEPTH)
        out = _scaled(
            total,
            a_scale_ptr,
            b_scale_ptr + group * n,
            b_scale_ptr,
            rows,
            columns,
            end,
            n,
            A_SCALED,
            B_SCALED,
            False,
        )
        there = (rows < end)[:, None] & (columns < n)[None, :]
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :], out, mask=there)
