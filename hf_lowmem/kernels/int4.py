"""Products of matrices in 4-bit integers, in plain torch: what every faster kernel equals.

A matrix is written row by row, with a scale for each row and codes of -8 .. 7, two a byte. The product of two such
matrices is exact in integers; scales and bias are put on it in fp32, each result rounded once more to its dtype.

* Inputs and weights have one code a value, to nearest, after a rotation (``rotated``). What is largest in a row may be
  the code -8, which 7 has no counterpart of: the scale's sign says which way.
* Gradients have two: a value in 8 bits, rounded stochastically, is 16 times one digit and another. Their products are
  two in 4 bits, added in integers (bit splitting, as in Xi and others, "Training Transformers with 4-bit Integers").

A row that holds an inf or a NaN has a NaN for its scale, so that nothing computed from it is a finite number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .int8 import SMALLEST, butterflies, dither, integer_product, scaled

# The scale's share of what is largest on either side of zero: a little less than half a unit beyond the largest codes,
# which it is rounded to without being clamped.
UNIT_UP, UNIT_DOWN = 1 / 7.49, 1 / 8.49
LEVELS8 = 119  # the largest value of two digits: 16 * 7 + 7
UNIT8 = 1 / 118.99
ALIGNED = 16  # bytes: rows of codes begin at multiples of it
DEEPEST = 1 << 21  # products of two digits and a code whose sum is sure to be an int32


@dataclass(frozen=True)
class Rows4:
    """A matrix in 4 bits, or in 8 of two digits.

    Args:
        codes: ``uint8[digits, rows, bytes]``, two codes a byte, the first in the lower half, with zeros behind the last
            column. A value is the sum of its digits, of which the first counts 16 times the second.
        scale: ``float32[rows]``, what one unit is worth, of either sign; None: 1 for all rows.
        columns: their number.
    """

    codes: Tensor
    scale: Tensor | None
    columns: int

    def values(self) -> Tensor:
        """``int8[rows, columns]``."""
        digits = (self.codes[..., None] >> torch.tensor([0, 4], dtype=torch.uint8, device=self.codes.device)) & 15
        digits = ((digits ^ 8).to(torch.int8) - 8).flatten(2)[..., : self.columns]
        return digits[0] if len(digits) == 1 else digits[0] * 16 + digits[1]

    def dequantized(self) -> Tensor:
        """``float32[rows, columns]``."""
        wide = self.values().float()
        return wide if self.scale is None else wide * self.scale[:, None]


def packed(digits: Tensor, scale: Tensor | None) -> Rows4:
    """A matrix whose digits lie a byte each: ``int8[digits, rows, columns]``."""
    columns = digits.shape[2]
    padded = torch.nn.functional.pad(digits, (0, -columns % (2 * ALIGNED))) & 15
    pairs = padded.view(torch.uint8).unflatten(2, (-1, 2))
    return Rows4(pairs[..., 0] | pairs[..., 1] << 4, scale, columns)


# -- rotation -----------------------------------------------------------------------------------------------------
def rotation(columns: int) -> tuple[int, int]:
    """How rows are rotated: blocks of so many neighbours, and then so many pieces. Both are powers of 4."""
    neighbours, pieces = (next((n for n in (64, 16, 4) if columns % n == 0), 1) for _ in range(2))
    return neighbours, pieces


@torch.no_grad()
def rotated(wide: Tensor) -> tuple[Tensor, int]:
    """Rows times an orthogonal matrix, so that a few large columns do not decide the scale of all.

    Each block of neighbours goes through a Walsh-Hadamard transform, and then the row, cut in pieces that lie far
    apart, through another: of 4,096 columns each becomes a sum of all. With so few codes more of it pays than in
    ``int8``.

    Args:
        wide: ``float32[rows, columns]``.

    Returns: them, and what they are still to be divided by, a power of 2.
    """
    neighbours, pieces = rotation(wide.shape[1])
    wide = butterflies(butterflies(wide, neighbours, 1), pieces, wide.shape[1] // pieces)
    return wide, math.isqrt(neighbours * pieces)


@torch.no_grad()
def rotated_back(x: Tensor) -> Tensor:
    """Undoes a rotation: computed in fp32, of ``x``'s dtype."""
    neighbours, pieces = rotation(x.shape[1])
    wide = butterflies(butterflies(x.float(), pieces, x.shape[1] // pieces), neighbours, 1)
    return (wide / math.isqrt(neighbours * pieces)).to(x.dtype)


# -- matrices -----------------------------------------------------------------------------------------------------
def rotated_rows(x: Tensor) -> tuple[Rows4, Tensor]:
    """A matrix whose rows are rotated, in 4 bits, to nearest, ties to even.

    Args:
        x: ``[rows, columns]`` in any float dtype, on any device.

    Returns: the matrix, and the scale of its rows, which gradients are to be multiplied with.
    """
    codes, scale = _rotated_codes(x)
    return packed(codes[None], scale), scale


def turned_rows(x: Tensor) -> Rows4:
    """The transpose of the codes that ``rotated_rows`` finds, without their scale."""
    codes, _ = _rotated_codes(x)
    return packed(codes.t()[None], None)


def split_rows(x: Tensor, column_scale: Tensor, key: int | None) -> Rows4:
    """A matrix in 8 bits, of two digits, rounded stochastically.

    Args:
        x: ``[rows, columns]``.
        column_scale: ``float32[columns]`` that ``x`` is multiplied with first, in fp32.
        key: of the random bits (``codec.tensor_key``); None rounds to nearest.
    """
    with torch.no_grad():
        wide = x.float() * column_scale
        largest = _largest(wide.abs())
        scale = torch.where(largest < SMALLEST, 0.0, largest * UNIT8)
        scale = torch.where(largest.isfinite(), scale, float("nan"))
        values = _units(wide, scale, dither(x, key))
        low = ((values + 8) & 15) - 8
        return packed(torch.stack(((values - low) >> 4, low)), scale)


def _rotated_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        wide, root = rotated(x.float())
        up, down = _largest(wide), _largest(-wide)
        # The side that reaches further is the one of the negative codes, of which there is one more.
        downwards = torch.maximum(up * UNIT_UP, down * UNIT_DOWN)
        scale = torch.where(down > up, downwards, -torch.maximum(down * UNIT_UP, up * UNIT_DOWN))
        largest = torch.maximum(up, down)
        scale = torch.where(largest < SMALLEST, 0.0, scale)
        scale = torch.where(largest.isfinite(), scale, float("nan"))
        return _units(wide, scale, None), scale / root


def _largest(wide: Tensor) -> Tensor:
    """Of each row; not less than 0."""
    if not wide.numel():
        return torch.zeros(len(wide), device=wide.device)
    return wide.amax(1).clamp_min(0)


def _units(wide: Tensor, scale: Tensor, dithered: Tensor | None) -> Tensor:
    usable = ((scale != 0) & scale.isfinite())[:, None]
    inverse = torch.where(usable, torch.ones_like(scale)[:, None] / scale[:, None], 0.0)
    units = wide * inverse if dithered is None else wide * inverse + dithered
    return torch.where(usable, units.round(), 0.0).to(torch.int8)


# -- products -----------------------------------------------------------------------------------------------------
@torch.no_grad()
def product(a: Rows4, b: Rows4, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias``.

    Args:
        a: of ``[m, k]``, in one digit or two.
        b: of ``[n, k]``, in one digit.
        dtype: of the result.
        bias: ``[n]``, added in fp32; None: nothing is.

    Returns: ``[m, n]``.
    """
    check(a, b)
    return scaled(integer_product(a.values(), b.values()).float(), a.scale, b.scale, dtype, bias)


def check(a: Rows4, b: Rows4) -> None:
    """Raises: ValueError where two matrices have no product."""
    if a.columns != b.columns:
        raise ValueError(f"rows of {a.columns} codes have no product with rows of {b.columns}")
    if a.columns > DEEPEST:
        raise ValueError(
            f'sums of {a.columns} products are too long for an int32, at most {DEEPEST} are not: write compute="int8"'
        )
    if len(b.codes) != 1:
        raise ValueError("the second matrix of a product has one digit")
