"""Products of matrices in 8-bit integers, in plain torch: what every faster kernel equals.

A matrix is written row by row: each row has a scale, its largest magnitude over 126.99, and codes of -127 .. 127. The
product of two such matrices is exact in integers; scales and bias are put on it in fp32, each result rounded once more
to its dtype.

A row that holds an inf or a NaN has a NaN for its scale, so that nothing computed from it is a finite number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import codec

LEVELS = 127  # the largest code
# The scale's share of the largest magnitude. A little more than 1 / 127, so that no code needs to be clamped, whatever
# is added to round it. A division by a number is a product with its inverse on some devices, so it is that everywhere.
UNIT = 1 / 126.99
SMALLEST = 2.0**-100  # rows whose largest magnitude is under it are zero: their inverse would leave fp32
EXACT = 1 << 24  # integers up to this one are exact in fp32
DEEPEST = 1 << 17  # products of two codes whose sum is sure to be an int32


@dataclass(frozen=True)
class Rows:
    """A matrix in 8 bits.

    Args:
        codes: ``int8[rows, columns]``.
        scale: ``float32[rows]``, what one unit of a row's codes is worth; None: 1 for all of them.
    """

    codes: Tensor
    scale: Tensor | None

    def dequantized(self) -> Tensor:
        """``float32[rows, columns]``."""
        wide = self.codes.float()
        return wide if self.scale is None else wide * self.scale[:, None]


def quantize_rows(
    x: Tensor, column_scale: Tensor | None = None, key: int | None = None, groups: Tensor | None = None
) -> Rows:
    """A matrix in 8 bits, each value rounded to nearest, ties to even, or stochastically.

    Args:
        x: ``[rows, columns]`` in any float dtype, on any device.
        column_scale: ``float32[columns]`` that ``x`` is multiplied with first, in fp32.
        key: of the random bits (``codec.tensor_key``); None rounds to nearest. Rounded stochastically, a value's mean
            over the keys is the value, but for 2**-9 of a unit.
        groups: ``int64[rows]``, for each row which row of a ``column_scale`` of ``[groups, columns]`` it is.
    """
    wide = _wide(x, column_scale if groups is None or column_scale is None else column_scale[groups])
    scale = _scale(wide)
    return Rows(_codes(wide, scale[:, None], dither(x, key)), scale)


@torch.no_grad()
def rotated_rows(x: Tensor) -> tuple[Rows, Tensor]:
    """A matrix in 8 bits whose rows are rotated: a few columns of large values do not decide the scale of all.

    The product of two matrices is that of both rotated. A row is cut in n pieces of equal length (``pieces``), which go
    through a Walsh-Hadamard transform: each becomes a sum of all, with signs, over the root of n. Rotations before
    quantization: QuaRot (Ashkboos and others 2024).

    Args: see ``quantize_rows``.

    Returns: the matrix, and the scale of its rows as they lie, which ``turned_codes`` takes.
    """
    wide = _wide(x, None)
    number = pieces(x.shape[1])
    rotated = butterflies(wide, number, wide.shape[1] // number)
    scale = _scale(rotated)
    return Rows(_codes(rotated, scale[:, None], None), scale / math.isqrt(number)), _scale(wide)


def butterflies(wide: Tensor, number: int, stride: int) -> Tensor:
    """The Walsh-Hadamard transform of every ``number`` values of a row that lie ``stride`` apart, a power of 2."""
    x = wide.reshape(len(wide), -1, number, stride) if wide.numel() else wide
    step = 1
    while step < number and wide.numel():
        pair = x.unflatten(2, (number // (2 * step), 2, step))
        one, other = pair[:, :, :, 0], pair[:, :, :, 1]
        x = torch.stack((one + other, one - other), 3).view(x.shape)
        step *= 2
    return x.reshape(wide.shape)


def pieces(columns: int) -> int:
    """In how many pieces a row is cut to be rotated: a power of 4, whose root is exact, of 32 columns or more each."""
    return next((n for n in (64, 16, 4) if columns % n == 0 and columns >= 32 * n), 1)


def quantize_columns(x: Tensor, key: int | None = None) -> Rows:
    """The transpose of a matrix in 8 bits: a scale for each column of ``x``.

    Args: see ``quantize_rows``.
    """
    wide = _wide(x, None)
    scale = _scale(wide.t())
    return Rows(_codes(wide, scale, dither(x, key)).t().contiguous(), scale)


def quantize_both(x: Tensor, column_scale: Tensor | None = None, key: int | None = None) -> tuple[Rows, Rows]:
    """``quantize_rows(x, column_scale, key)`` and ``quantize_columns(x, key)``, with the same random bits."""
    return quantize_rows(x, column_scale, key), quantize_columns(x, key)


def turned_codes(x: Tensor, scale: Tensor) -> Tensor:
    """The transpose of the codes that ``quantize_rows`` finds, for a scale that it found.

    Args:
        x: ``[rows, columns]``.
        scale: ``float32[rows]``.

    Returns: ``int8[columns, rows]``.
    """
    return _codes(_wide(x, None), scale[:, None], None).t().contiguous()


@torch.no_grad()
def _wide(x: Tensor, column_scale: Tensor | None) -> Tensor:
    return x.float() if column_scale is None else x.float() * column_scale


@torch.no_grad()
def _scale(wide: Tensor) -> Tensor:
    """Of each row."""
    if not wide.numel():
        return torch.zeros(len(wide), device=wide.device)
    largest = wide.abs().amax(1)
    scale = torch.where(largest < SMALLEST, 0.0, largest * UNIT)
    return torch.where(largest.isfinite(), scale, float("nan"))


@torch.no_grad()
def _codes(wide: Tensor, scale: Tensor, dither: Tensor | None) -> Tensor:
    usable = scale > 0
    inverse = torch.where(usable, torch.ones_like(scale) / scale, 0.0)
    units = wide * inverse if dither is None else wide * inverse + dither
    return torch.where(usable, units.round(), 0.0).to(torch.int8)


def dither(x: Tensor, key: int | None) -> Tensor | None:
    """Between -0.5 and 0.5, in steps of 2**-8: added before a value is rounded to nearest, that rounds it
    stochastically. These are the bytes, lowest first, of ``codec.Noise``'s first draw, four values a lane; each row
    begins with a lane of its own.
    """
    if key is None:
        return None
    rows, columns = x.shape
    quads = (columns + 3) // 4
    lanes = codec.Noise(key, -(-rows * quads // 16), x.device).draw().view(-1)[: rows * quads]
    octets = torch.stack([(lanes >> by) & 255 for by in (0, 8, 16, 24)], 1).view(rows, 4 * quads)[:, :columns]
    return (octets.float() + 0.5) * 2.0**-8 - 0.5


@torch.no_grad()
def product(a: Rows, b: Rows, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias``.

    Args:
        a: of ``[m, k]``.
        b: of ``[n, k]``.
        dtype: of the result.
        bias: ``[n]``, added in fp32; None: nothing is.

    Returns: ``[m, n]``.
    """
    check_depth(a, b)
    if a.codes.shape[1] > DEEPEST:
        return product_in_parts(product, a, b, dtype, bias)
    return scaled(integer_product(a.codes, b.codes).float(), a.scale, b.scale, dtype, bias)


@torch.no_grad()
def grouped_product(a: Rows, codes: Tensor, scale: Tensor | None, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows group by group, each times a matrix of its group's.

    Args:
        a: of ``[m, k]``.
        codes: ``int8[groups, n, k]``, of any strides.
        scale: ``float32[groups, n]``; None: 1 for all.
        ends: ``int32[groups]``, the row behind each group's last one.
        dtype: of the result.

    Returns: ``[m, n]``; rows behind the last group are of no meaning.
    """
    out = torch.zeros(len(a.codes), codes.shape[1], dtype=dtype, device=a.codes.device)
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            rows = Rows(a.codes[start:end], None if a.scale is None else a.scale[start:end])
            out[start:end] = product(rows, Rows(codes[group], None if scale is None else scale[group]), dtype)
        start = end
    return out


@torch.no_grad()
def product_in_parts(
    product: Callable[[Rows, Rows, torch.dtype], Tensor], a: Rows, b: Rows, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """An engine's ``product`` of matrices whose sums are too long for an int32: parts of them are added in fp32."""
    total: Tensor | None = None
    for one, other in zip(a.codes.split(DEEPEST, 1), b.codes.split(DEEPEST, 1), strict=True):
        part = product(Rows(one, None), Rows(other, None), torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return scaled(total, a.scale, b.scale, dtype, bias)


def check_depth(a: Rows, b: Rows) -> None:
    """Raises: ValueError where the rows of two matrices are not of one length."""
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"rows of {a.codes.shape[1]} codes have no product with rows of {b.codes.shape[1]}")


def scaled(out: Tensor, rows: Tensor | None, columns: Tensor | None, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Integer sums, in fp32 and written over, times the scales of rows and columns; the bias is added, and rounded."""
    if rows is not None:
        out *= rows[:, None]
    if columns is not None:
        out *= columns
    if bias is not None:
        out += bias.float()
    return out.to(dtype)


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of integers, exact.

    Args:
        a: ``int8[m, k]``.
        b: ``int8[n, k]``.

    Returns: ``int32[m, n]``.
    """
    (m, k), n = a.shape, len(b)
    if not (m and k and n):
        return torch.zeros(m, n, dtype=torch.int32, device=a.device)
    if a.device.type == "cpu" and min(m, k, n) > 1:  # else strides say little, and torch 2.13 takes them for others
        return torch._int_mm(a.contiguous(), b.contiguous().t())
    if a.device.type == "cuda":  # cuBLAS takes 17 rows or more, and multiples of 8
        a, b = _padded(a, max(17, m), -(-k // 8) * 8), _padded(b, -(-n // 8) * 8, -(-k // 8) * 8)
        return torch._int_mm(a, b.t())[:m, :n]
    step = EXACT // LEVELS**2  # sums of so many products are exact in fp32
    parts = (a[:, i : i + step].float() @ b[:, i : i + step].float().t() for i in range(0, k, step))
    return torch.stack([part.to(torch.int32) for part in parts]).sum(0, dtype=torch.int32)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """With zeros behind it, and contiguous."""
    if x.shape == (rows, columns):
        return x.contiguous()
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))
