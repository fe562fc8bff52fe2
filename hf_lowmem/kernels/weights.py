"""How a weight is written in 8 or 4 bits, to cross a link or to rest. Plain torch: what every faster kernel equals.

* ``int8``: a row (the last dimension) has one fp32 scale, its largest magnitude over 126.99, and codes of -127 .. 127;
* ``int4``: each 32 values of a row have one bf16 scale, which has a sign: what is largest in magnitude is written as
  the code -8 or close to it, everything as a code of -8 .. 7. Byte ``j`` of the 16 holds value ``j`` in its low half
  and value ``16 + j`` in its high one, each with 8 added.

Codes are the nearest, ties to even. Values that share a scale with an inf or a NaN are NaN when they are read: their
scale is one, and their codes have no meaning. Where all are under 2**-100 they are zero.

A weight that rests in 8 bits and has no master is read, updated and written again (``recode``): stochastically, and at
the scales that it has, as long as it fits them. New scales in each step would round anew what has not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .. import codec
from .int8 import LEVELS, UNIT, Rows, quantize_rows

SMALLEST = 2.0**-100  # a scale under it has no inverse that is sure to be an fp32
FINDS_CODES = "_hf_lowmem_codes"  # of a parameter that is a stand-in: given it, gives its codes and scales
ROOM = 1 + 1 / 16  # that a row is given when it has outgrown its scale


@dataclass(frozen=True)
class WeightForm:
    """One way of writing weights.

    Args:
        name: of the setting, ``"int8"`` or ``"int4"``.
        bits: of a code.
        group: values that share a scale; None: a row does.
        scale: dtype of the scales.
    """

    name: str
    bits: int
    group: int | None
    scale: torch.dtype

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape can be written so."""
        return len(shape) >= 2 and prod(shape) > 0 and shape[-1] % (self.group or 1) == 0

    def parts(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the codes (``int8``, or two a byte in ``uint8``) and of the scales."""
        columns, rows = shape[-1], prod(shape[:-1])
        return (rows, columns * self.bits // 8), (rows, columns // (self.group or columns))

    @property
    def codes(self) -> torch.dtype:
        """The dtype in which codes lie."""
        return torch.int8 if self.bits == 8 else torch.uint8

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of codes and scales."""
        codes, scales = self.parts(shape)
        return prod(codes) + prod(scales) * self.scale.itemsize


INT8 = WeightForm("int8", 8, None, torch.float32)
INT4 = WeightForm("int4", 4, 32, torch.bfloat16)
FORMS = {form.name: form for form in (INT8, INT4)}


@torch.no_grad()
def encode(x: Tensor, form: WeightForm, codes: Tensor, scale: Tensor) -> None:
    """Writes a weight.

    Args:
        x: ``[..., columns]``, in fp32, bf16 or fp16, contiguous.
        codes, scale: to be written, of the shapes and dtypes that ``form`` says.
    """
    if form.group is None:
        rows = quantize_rows(x.reshape(-1, x.shape[-1]))
        codes.copy_(rows.codes)
        assert rows.scale is not None
        scale.view(-1).copy_(rows.scale)
        return
    wide = x.reshape(-1, form.group).float()
    low, high = wide.amin(1), wide.amax(1)
    top = torch.where(-low >= high, -low, -high)
    found = torch.where(wide.isfinite().all(1), top * 0.125, float("nan")).bfloat16()
    found = torch.where(found.abs() < SMALLEST, 0.0, found)
    usable = found.abs() > 0  # of a NaN: no
    inverse = torch.where(usable, 1 / found.float(), 0.0)
    units = torch.where(usable[:, None], wide * inverse[:, None], 0.0).round().clamp(-8, 7)
    nibbles = (units + 8).to(torch.uint8).view(-1, 2, form.group // 2)
    codes.view(-1, form.group // 2).copy_(nibbles[:, 0] | nibbles[:, 1] << 4)
    scale.view(-1).copy_(found)


@torch.no_grad()
def decode(codes: Tensor, scale: Tensor, form: WeightForm, out: Tensor) -> None:
    """Reads what ``encode`` has written: each code times its scale in fp32, rounded once to the dtype of ``out``."""
    if form.group is None:
        out.copy_(Rows(codes, scale.view(-1)).dequantized().view(out.shape))
        return
    whole = levels(codes, form.group).view(-1, form.group).float()
    out.copy_((whole * scale.view(-1, 1).float()).view(out.shape))


def levels(codes: Tensor, group: int) -> Tensor:
    """Codes of 4 bits, one a byte: ``int8[rows, columns]``."""
    nibbles = codes.view(-1, group // 2)
    return torch.stack((nibbles & 15, nibbles >> 4), 1).view(codes.shape[0], -1).to(torch.int8) - 8


@torch.no_grad()
def recode(x: Tensor, codes: Tensor, scale: Tensor, key: int) -> None:
    """Writes a weight of form ``int8`` again that has been read and changed, stochastically.

    A row keeps its scale while that is enough; otherwise it has one of 17/16 of what it needs from then on. Value ``i``
    of the weight takes lane ``i`` of ``codec.Noise``'s first draw: its upper 14 bits are a number between -0.5 and 0.5,
    which is added, in units of the scale, before it is rounded to nearest. With 15 bits or more, what has not changed
    could be rounded to another code, for the product with the inverse of a scale is off by 3 * 127 / 2**24.

    Args:
        x: ``float32[rows, columns]``.
        codes, scale: ``int8[rows, columns]`` and ``float32[rows, 1]``, to be changed.
        key: of the random bits (``codec.tensor_key``).
    """
    largest = x.abs().amax(1, keepdim=True)
    needed = torch.where(largest < SMALLEST, 0.0, largest * UNIT)
    needed = torch.where(largest.isfinite(), needed, float("nan"))
    scale.copy_(torch.where(largest <= scale * LEVELS, scale, needed * ROOM))
    lanes = codec.Noise(key, -(-x.numel() // 16), x.device).draw().view(-1)[: x.numel()].view(x.shape)
    dither = ((lanes >> 18).float() + 0.5) * 2.0**-14 - 0.5
    usable = scale > 0
    units = x * torch.where(usable, 1 / scale, 0.0) + dither
    codes.copy_(torch.where(usable, units.round(), 0.0))


def shifted(key: int, first: int) -> int:
    """The key with which ``recode`` rounds the values from number ``first`` on as it would within the whole weight."""
    return key >> 32 << 32 | (key + first * 0x9E3779B9) & 0xFFFFFFFF


def empty(shape: tuple[int, ...], form: WeightForm, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Room for the codes and the scales of a weight."""
    codes, scale = form.parts(shape)
    return torch.empty(codes, dtype=form.codes, device=device), torch.empty(scale, dtype=form.scale, device=device)


# -- a parameter without a weight ---------------------------------------------------------------------------------
def stand_in(p: Tensor, device: torch.device) -> Tensor:
    """What a parameter is while its weight is nowhere but in few bits."""
    return torch.full((), float("nan"), dtype=p.dtype, device=device).expand(p.shape)


def is_stand_in(p: Tensor) -> bool:
    """Whether a parameter is one now."""
    return p.numel() > 1 and not any(p.stride())
