"""How an optimizer state and a master weight are written as bytes.

Plain torch, on any device, a few tensor operations a function: slow, short, and the oracle that every native kernel
equals bit for bit. Nothing here keeps state.

Formats (docs/numerics.md has the measurements behind each choice):

* first moment ``m``: ``m = level * scale / 127`` with one fp32 scale (the absmax) a block; the levels are -127 .. 127
  in 8 bits, a sign and 0, 1, 3, 7, 15, 31, 63 or 127 in 4, the number of the level in two's complement. Chosen by
  stochastic rounding; zero stays zero;
* second moment ``v``: ``sqrt(v)`` as an unsigned tiny float (E3M1 in 4 bits, E3M5 in 8), relative to one fp32 scale
  (the block's largest) a block. Zero is no code point. Chosen by stochastic rounding. Its least level, 1/192 or 1/252
  of the largest, is not far under m's 1/127: a small m that is rounded up to a level meets no root much smaller;
* master weight, 24 bits, rounded stochastically: the bf16 or fp16 weight nearest to it, and one ``int8`` holding the
  rest in units of 1/256 of the weight's last place;
* 16-bit weights without a master are rounded stochastically.

The random bits are a hash of (key, block, position): they depend on no thread, no order and no machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 127  # what the largest m of a block is written as
HALF = 64  # values that share one draw of 512 random bits; two halves make a 4-bit block
TO_NEAREST = 128  # the constant noise that makes stochastic rounding round to nearest
SMALLEST_SCALE = 2.0**-100  # a block whose largest magnitude is under this is written as zero
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class StateCodec:
    """One width of the two AdamW moments.

    Args:
        bits: width of one code, 4 or 8.
        block: values that share a scale, a multiple of 64.
        mantissa: mantissa bits of the code of ``sqrt(v)``.

    A tensor of ``n`` values is ``blocks(n)`` blocks. In 4 bits a block's 64 bytes hold its first 64 values in their low
    nibbles and the others in their high ones, so the last block is padded; of either 64 the values ``8 i`` to ``8 i +
    7`` lie in the bytes from ``16 i`` on, those 32 further on in the next 8 bytes (unpacked within lanes of 16 bytes,
    as vector units like to, each 32 values come out in their order). In 8 bits there is a byte a value.
    """

    bits: int
    block: int
    mantissa: int

    @property
    def zero(self) -> int:
        """The byte of which m's codes are made where m is zero."""
        return 0 if self.bits == 4 else 128

    @property
    def top(self) -> float:
        """What the block's largest ``sqrt(v)`` is scaled to before its float bits are cut: the last code's value."""
        exponent = 2 ** (self.bits - self.mantissa)
        return (2.0 - 2.0**-self.mantissa) * 2.0**exponent

    def blocks(self, n: int) -> int:
        return -(-n // self.block)

    def nbytes(self, n: int) -> int:
        """Bytes of one moment's codes for ``n`` values, without the scales (4 bytes a block)."""
        return self.blocks(n) * self.block // 2 if self.bits == 4 else n

    # -- packing ------------------------------------------------------------------------------------------------
    def pack(self, codes: Tensor, n: int) -> Tensor:
        """``int[blocks, block]`` in ``0 .. 2**bits - 1`` to ``uint8[nbytes(n)]``."""
        if self.bits == 8:
            return codes.to(torch.uint8).flatten()[:n].contiguous()
        low, high = codes.view(-1, 2, 2, 4, 8).transpose(2, 3).unbind(1)
        return (low | (high << 4)).to(torch.uint8).flatten()

    def unpack(self, data: Tensor, n: int, padding: int = 0) -> Tensor:
        """``uint8[nbytes(n)]`` to ``int32[blocks, block]``; ``padding`` fills an 8-bit tensor's last block."""
        codes = data.to(torch.int32)
        if self.bits == 8:
            return F.pad(codes, (0, -n % self.block), value=padding).view(-1, self.block)
        codes = codes.view(-1, 4, 2, 8).transpose(1, 2)
        return torch.stack((codes & 15, codes >> 4), 1).view(-1, self.block)

    # -- first moment -------------------------------------------------------------------------------------------
    def decode_m(self, data: Tensor, n: int) -> Tensor:
        """Codes to ``float32[blocks, block]`` integers ``-127 .. 127``; times ``scale / 127`` they are m."""
        if self.bits == 8:
            return (self.unpack(data, n, padding=128) - 128).float()
        codes = (self.unpack(data, n) ^ 8) - 8
        magnitude = ((1 << codes.abs()) - 1).float()
        return torch.where(codes < 0, -magnitude, magnitude)

    def encode_m(self, m: Tensor, noise: Tensor, n: int, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``m`` ``float32[blocks, block]`` to (codes ``uint8[nbytes(n)]``, scales ``float32[blocks]``).

        The value is rounded twice: to fixed point with 8 fractional bits, by the dither, and to a code, by the noise.
        Were the first rounding to nearest, a change too small for it would never add up.

        Args:
            noise: ``int32[blocks, block]`` in 0 .. 255; its mean rounds without bias.
            dither: ``int32[blocks]`` in 0 .. 63, the same. None: to nearest. (63 is as far as it may go: with more, the
                block's largest value could be rounded past the last code.)
        """
        scale = block_scale(m.abs().amax(1))
        unit = inverse(scale, LEVELS)[:, None]
        if self.bits == 8:
            shift = torch.zeros_like(scale) if dither is None else (dither.float() - 31.5) / 64
            fixed = torch.round(fma(unit * 256, m, shift[:, None])).to(torch.int32)
            return self.pack(((fixed + noise) >> 8) + 128, n), scale
        # One more than the magnitude is a float whose exponent is the code, and halfway to the next one is halfway.
        level = _round_float(fma(unit, m.abs(), torch.ones_like(m)), 0, 0x3F800000, noise, dither)
        return self.pack(torch.where(m.view(torch.int32) < 0, -level, level) & 15, n), scale

    # -- second moment ------------------------------------------------------------------------------------------
    def decode_root(self, data: Tensor, n: int) -> Tensor:
        """Codes to ``float32[blocks, block]``; times ``scale / top`` they are sqrt(v)."""
        return ((self.unpack(data, n) << (23 - self.mantissa)) + 0x40000000).view(torch.float32)

    def encode_root(self, root: Tensor, noise: Tensor, n: int, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``sqrt(v)`` ``float32[blocks, block]`` to (codes ``uint8[nbytes(n)]``, scales ``float32[blocks]``).

        Args: as ``encode_m``'s.
        """
        scale = block_scale(root.amax(1))
        scaled = root * inverse(scale, self.top)[:, None]
        return self.pack(_round_float(scaled, self.mantissa, 0x40000000, noise, dither), n), scale


def _round_float(x: Tensor, mantissa: int, base: int, noise: Tensor, dither: Tensor | None) -> Tensor:
    """``x`` ``float32[blocks, block]`` to the exponent and first mantissa bits of its pattern, counted from ``base``.

    Between two codes the pattern grows as the value does, so rounding it stochastically rounds the value so.
    """
    shift = 23 - mantissa - 8
    half = torch.tensor(1 << (shift - 1)) if dither is None else ((2 * dither + 1) << (shift - 7))[:, None]
    fixed = (x.view(torch.int32) - base + half.to(x.device, torch.int32)) >> shift
    return (fixed.clamp(0, 0xFFFF) + noise).clamp_max(0xFFFF) >> 8


STATE4 = StateCodec(bits=4, block=128, mantissa=1)
STATE8 = StateCodec(bits=8, block=256, mantissa=5)
STATES = {4: STATE4, 8: STATE8}
BLOCK32 = 256  # block of fp32 states: it numbers the random bits of 16-bit weights, nothing else


def as_blocks(x: Tensor, block: int) -> Tensor:
    """Flat ``x`` as ``[blocks, block]``, zeros behind its end."""
    pad = -x.numel() % block
    return (F.pad(x, (0, pad)) if pad else x).view(-1, block)


def block_scale(largest: Tensor) -> Tensor:
    """A block's scale from its largest magnitude, ``float32[blocks]``: too small a block is a block of zeros."""
    return torch.where(largest >= SMALLEST_SCALE, largest, torch.zeros_like(largest))


def inverse(scale: Tensor, top: float) -> Tensor:
    """``top / scale``, zero where the scale is zero."""
    return torch.where(scale > 0, torch.full_like(scale, top) / scale, torch.zeros_like(scale))


# -- random bits ------------------------------------------------------------------------------------------------
def mix64(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): one 64-bit word to another."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def tensor_key(seed: int, step: int, index: int) -> int:
    """The 64-bit key of one tensor's random bits in one step."""
    return mix64(seed ^ mix64(step ^ _mixed(index)))


_mixed = functools.lru_cache(maxsize=1 << 16)(mix64)


class Noise:
    """The random bits of every block of one tensor in one step: 16 lanes of xorshift32 a block, seeded by a hash.

    Lane ``l`` of block ``b`` starts at ``fmix32((16 b + l) * 0x9E3779B9 + low) ^ high``, ``low`` and ``high`` being
    the key's halves and fmix32 MurmurHash3's finalizer. A draw takes the lanes as they are and steps them
    (Marsaglia 2003: 13, 17, 5). Written one after another, little-endian, they are 32 words of 16 bits. The draws
    of a block are, in this order: if its weights are 16 bits rounded stochastically, two for each half of 64
    values, a word a value; then one for each half, whose 64 values share 32 words. Value ``j`` under 32 takes the
    lower byte of word ``j`` for m and the upper one for v; value ``32 + j`` the upper one for m and the lower one
    for v. The extension of a 24-bit master takes for value ``j`` the exclusive or of word ``j``'s bytes, for value
    ``32 + j`` that of word ``j``'s lower byte and the upper one of the word two further on, round the eight words
    from ``j // 8 * 8``. So the three noises of one value are independent in pairs; those of two values that share a
    word need not be.

    Args:
        key: see ``tensor_key``.
        blocks: number of blocks.
        device: where the bits are wanted.
        first: number of the first block.
    """

    def __init__(self, key: int, blocks: int, device: torch.device | str = "cpu", first: int = 0) -> None:
        lane = torch.arange(first * 16, (first + blocks) * 16, device=device, dtype=torch.int64)
        x = (lane * 0x9E3779B9 + (key & _MASK32)) & _MASK32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
        self._lanes = ((x ^ (x >> 16)) ^ (key >> 32)).view(blocks, 16)
        block = torch.arange(first, first + blocks, device=device, dtype=torch.int64)
        self._weyl = (block * 0x9E3779B9 + (key >> 32)) & _MASK32

    def dithers(self) -> tuple[Tensor, Tensor]:
        """6 bits for every block of m and of v, each ``int32[blocks]`` in 0 .. 63.

        A Weyl sequence over the blocks, started by the key: over the steps of a run uniform for every block.
        """
        return ((self._weyl >> 20) & 63).to(torch.int32), (self._weyl >> 26).to(torch.int32)

    def draw(self) -> Tensor:
        """The next draw, ``int64[blocks, 16]`` in 0 .. 2**32 - 1."""
        out = x = self._lanes
        x = x ^ ((x << 13) & _MASK32)
        x = x ^ (x >> 17)
        self._lanes = x ^ ((x << 5) & _MASK32)
        return out

    def weight_words(self, halves: int) -> Tensor:
        """16 bits for every value, ``int32[blocks, 64 * halves]``."""
        return torch.cat([_words(self.draw()) for _ in range(2 * halves)], 1)

    def rounding_bytes(self, halves: int) -> tuple[Tensor, Tensor, Tensor]:
        """8 bits for every value of m, of v and of the extension, each ``int32[blocks, 64 * halves]``."""
        words = torch.cat([_words(self.draw()) for _ in range(halves)], 1).view(-1, halves, 4, 8)
        lower, upper = words & 255, words >> 8
        m, v = torch.stack((lower, upper), 2), torch.stack((upper, lower), 2)
        extension = torch.stack((lower ^ upper, lower ^ upper.roll(-2, 3)), 2)
        return m.flatten(1), v.flatten(1), extension.flatten(1)


def _words(lanes: Tensor) -> Tensor:
    """32-bit lanes as 16-bit words, the lower one first, ``int32[blocks, 32]``."""
    return torch.stack((lanes & 0xFFFF, lanes >> 16), 2).flatten(1).to(torch.int32)


# -- master weights ---------------------------------------------------------------------------------------------
def split_master(x: Tensor, dtype: torch.dtype, noise: Tensor | int = TO_NEAREST) -> tuple[Tensor, Tensor]:
    """fp32 to a 24-bit master in two parts: (weight of ``dtype``, extension ``int8``).

    The weight is the master rounded to nearest, the extension what that left.

    Args:
        noise: ``int32`` in 0 .. 255, one a value; its mean rounds ``x`` to 24 bits without bias.
    """
    bits = x.view(torch.int32)
    if dtype is torch.bfloat16:
        y = bits + noise
        weight = ((y + 0x8000) >> 16).to(torch.int16).view(dtype)
        return weight, _signed_byte(y >> 8)
    magnitude, sign = _half_magnitude(x)
    y = (magnitude + (noise >> 3)).clamp_max(0x7C00 << 13)
    weight = (torch.bitwise_or((y + 0x1000) >> 13, sign)).to(torch.int16).view(dtype)
    return weight, _signed_byte(y >> 5)


def join_master(weight: Tensor, extension: Tensor) -> Tensor:
    """(weight bf16 or fp16, extension ``int8``) to the fp32 master.

    Whoever writes zeros into a weight (pruning, say) may leave an old extension behind. It must not turn the zero into
    something else of the wrong sign: a bf16 zero has no extension, an fp16 zero none below zero.
    """
    word = weight.view(torch.int16).to(torch.int32)
    ext = extension.to(torch.int32)
    if weight.dtype is torch.bfloat16:
        ext = torch.where((word & 0x7FFF) == 0, torch.zeros_like(ext), ext)
        return ((word << 16) + (ext << 8)).view(torch.float32)
    magnitude = (((word & 0x7FFF) << 13) + (ext << 5)).clamp_min(0)
    value = magnitude.view(torch.float32) * 2.0**112
    return torch.where(word < 0, -value, value)


def round_stochastic(x: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """fp32 to bf16 or fp16, up or down with the probability that makes the mean exact.

    Args:
        words: ``int32`` in 0 .. 65535, one a value.
    """
    if dtype is torch.bfloat16:
        return ((x.view(torch.int32) + words) >> 16).to(torch.int16).view(dtype)
    magnitude, sign = _half_magnitude(x)
    y = (magnitude + (words >> 3)).clamp_max(0x7C00 << 13)
    return ((y >> 13) | sign).to(torch.int16).view(dtype)


def _half_magnitude(x: Tensor) -> tuple[Tensor, Tensor]:
    """|x| as an int32 whose top bits, from bit 13, are the fp16 pattern (truncated), and fp16's sign bit.

    Scaled by 2**-112 an fp32's exponent field is fp16's, and what is subnormal in fp16 is subnormal in fp32.
    """
    scaled = (x.abs() * 2.0**-112).view(torch.int32)
    return scaled, (x.view(torch.int32) >> 16) & 0x8000


def _signed_byte(x: Tensor) -> Tensor:
    return ((x & 255) ^ 128).sub(128).to(torch.int8)


def bits_of(x: Tensor) -> Tensor:
    """A tensor of 2- or 4-byte floats as integers of their width."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


# -- arithmetic -------------------------------------------------------------------------------------------------
def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in fp32, rounded once.

    torch has no such operation. In float64 the product is exact; the sum is rounded to odd, after which the second
    rounding, to fp32, is the only one (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    product = b.double() * (a.double() if isinstance(a, Tensor) else a)
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & ((bits & 1) == 0) & total.isfinite(), bits + toward, bits)
    return odd.view(torch.float64).float()
