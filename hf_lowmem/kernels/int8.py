"""Products of matrices in 8-bit integers, in plain torch: what every faster kernel equals.

A matrix is written row by row: each row has a scale, its largest magnitude over 127, and codes of -127 .. 127. The
product of two such matrices is exact in integers; scales and bias are put on it in fp32, each result rounded once more
to its dtype.

A row that holds an inf or a NaN has a NaN for its scale, so that nothing computed from it is a finite number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import codec

LEVELS = 127
UNIT = 1 / 127  # rounded to fp32: a division by a number is a product with its inverse on some devices
SMALLEST = 2.0**-100  # rows whose largest magnitude is under it are zero: their inverse would leave fp32
EXACT = 1 << 24  # integers up to this one are exact in fp32


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


@torch.no_grad()
def quantize_rows(x: Tensor, column_scale: Tensor | None = None, key: int | None = None) -> Rows:
    """A matrix in 8 bits, each value rounded to nearest, ties to even, or stochastically.

    Args:
        x: ``[rows, columns]`` in any float dtype, on any device.
        column_scale: ``float32[columns]`` that ``x`` is multiplied with first, in fp32.
        key: of the random bits (``codec.tensor_key``); None rounds to nearest. Rounded stochastically, a value's mean
            over the keys is the value, but for 2**-17 of a unit.
    """
    wide = x.float() if column_scale is None else x.float() * column_scale
    if not wide.numel():
        return Rows(torch.zeros(x.shape, dtype=torch.int8, device=x.device), wide.new_zeros(len(x)))
    largest = wide.abs().amax(1)
    largest = torch.where(largest < SMALLEST, 0.0, largest)  # a NaN stays one
    finite = largest.isfinite()
    inverse = torch.where(finite & (largest > 0), torch.full_like(largest, LEVELS) / largest, 0.0)
    units = torch.where(finite[:, None], wide * inverse[:, None], 0.0)
    if key is None:
        units = units.round()
    else:
        blocks = -(-units.numel() // (2 * codec.HALF))
        words = codec.Noise(key, blocks, x.device).weight_words(2).view(-1)[: units.numel()].view(units.shape)
        units = (units + (words.float() + 0.5) * 2.0**-16).floor()
    codes = units.clamp_(-LEVELS, LEVELS).to(torch.int8)
    return Rows(codes, torch.where(finite, largest * UNIT, float("nan")))


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
    out = integer_product(a.codes, b.codes).float()
    if a.scale is not None:
        out *= a.scale[:, None]
    if b.scale is not None:
        out *= b.scale
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
    if a.device.type == "cpu":
        return torch._int_mm(a, b.t())
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
