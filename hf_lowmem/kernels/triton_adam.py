"""The AdamW step of parameters that stay on a GPU, in Triton: the bits of ``kernels.adam``, its oracle.

One program steps a few blocks of values. What the C++ core keeps in registers is here one tile, ``[blocks, values]``,
and every value computes its own random bits. Nothing may be contracted into a fused operation that is not written as
one: the kernels are launched with ``enable_fp_fusion=False``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import codec
from .adam import AdamTensor

TILE = 1024  # values that a program steps at once
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def adam_step(tensors: Sequence[AdamTensor]) -> Tensor:
    """Does one AdamW step of every tensor; equals ``kernels.adam.adam_step`` bit for bit.

    Args:
        tensors: what to step, all on one CUDA device, each with the same constraints as there. ``copy`` must be None.

    Returns:
        Number of blocks left as they were because a gradient in them was not finite or too large, ``int32[]`` on the
        device: nobody waits for it.

    Raises:
        ValueError: a tensor has a ``copy``.
    """
    device = tensors[0].weight.device if tensors else torch.device("cpu")
    skipped = torch.zeros((), dtype=torch.int32, device=device)
    for t in tensors:
        if t.copy is not None:
            raise ValueError("a parameter on the device is stepped where it is: it has no 16-bit copy")
        _launch(t, skipped)
    return skipped


def _launch(t: AdamTensor, skipped: Tensor) -> None:
    form = codec.STATES.get(t.bits)
    block = form.block if form else codec.BLOCK32
    n, k = t.weight.numel(), t.constants
    blocks = -(-n // block)
    rows = TILE // block
    unused = skipped  # what a kernel of these types does not touch
    _step[(-(-blocks // rows),)](
        codec.bits_of(t.weight),
        unused if t.extension is None else t.extension,
        codec.bits_of(t.grad),
        t.m,
        t.v,
        unused if t.m_scale is None else t.m_scale,
        unused if t.v_scale is None else t.v_scale,
        skipped,
        n,
        t.start // block,
        _signed(t.key),
        _signed(t.key >> 32),
        k.grad_limit(t.grad.dtype),
        k.c_m,
        k.b_m,
        k.c_h,
        k.b_v,
        k.root_correction,
        k.eps,
        k.step_size,
        k.decay,
        WEIGHT=KINDS[t.weight.dtype],
        GRAD=KINDS[t.grad.dtype],
        EXTENDED=t.extension is not None,
        BITS=t.bits,
        BLOCK=block,
        ROWS=rows,
        enable_fp_fusion=False,
    )


def _signed(word: int) -> int:
    """The last 32 bits as a signed number, which Triton takes as one type whatever its size."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


# -- random bits: codec.Noise ---------------------------------------------------------------------------------------
@triton.jit
def _seed(lane, block, key_low, key_high):
    x = (block * 16 + lane).to(tl.uint32) * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) ^ key_high.to(tl.uint32, bitcast=True)


@triton.jit
def _word(number, draw, block, key_low, key_high, DRAWS: tl.constexpr):
    """Word ``number`` of the ``draw``-th draw of a block, counted from 0."""
    x = _seed(number // 2, block, key_low, key_high)
    out = x
    for i in tl.static_range(1, DRAWS):
        x = x ^ (x << 13)
        x = x ^ (x >> 17)
        x = x ^ (x << 5)
        out = tl.where(draw == i, x, out)
    return ((out >> ((number % 2) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def _rounding_words(value, first, block, key_low, key_high, DRAWS: tl.constexpr):
    """The word whose bytes round a value's moments, and the one whose upper byte its extension takes besides."""
    number = value % 32
    beside = tl.where(value % 64 < 32, number, number // 8 * 8 + (number + 2) % 8)
    draw = first + value // 64
    own = _word(number, draw, block, key_low, key_high, DRAWS)
    return own, _word(beside, draw, block, key_low, key_high, DRAWS)


@triton.jit
def _place(value):
    """The byte of its half's 64 in which a value's 4-bit code lies: codec.StateCodec."""
    return value % 32 // 8 * 16 + value // 32 * 8 + value % 8


# -- numbers ----------------------------------------------------------------------------------------------------
@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _int(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _widen(bits, KIND: tl.constexpr):
    """A loaded word of fp32, bf16 or fp16 as fp32."""
    if KIND == 0:
        return _float(bits)
    elif KIND == 1:
        return _float(bits.to(tl.int32) << 16)
    else:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _half_magnitude(x):
    """codec._half_magnitude: |x| as bits whose top ones, from bit 13, are the fp16 pattern; and fp16's sign bit."""
    return _int(tl.abs(x) * 1.925929944387236e-34), (_int(x) >> 16) & 0x8000


@triton.jit
def _join(bits, extension, KIND: tl.constexpr):
    """codec.join_master"""
    word, ext = bits.to(tl.int32), extension.to(tl.int32)
    if KIND == 1:
        return _float((word << 16) + (tl.where((word & 0x7FFF) == 0, 0, ext) << 8))
    else:
        value = _float(tl.maximum(((word & 0x7FFF) << 13) + (ext << 5), 0)) * 5.192296858534828e33
        return tl.where(word < 0, -value, value)


@triton.jit
def _split(x, noise, KIND: tl.constexpr):
    """codec.split_master"""
    if KIND == 1:
        y = _int(x) + noise
        return (y + 0x8000) >> 16, y >> 8
    else:
        magnitude, sign = _half_magnitude(x)
        y = tl.minimum(magnitude + (noise >> 3), 0x7C00 << 13)
        return ((y + 0x1000) >> 13) | sign, y >> 5


@triton.jit
def _round_stochastic(x, words, KIND: tl.constexpr):
    """codec.round_stochastic"""
    if KIND == 1:
        return (_int(x) + words) >> 16
    else:
        magnitude, sign = _half_magnitude(x)
        return (tl.minimum(magnitude + (words >> 3), 0x7C00 << 13) >> 13) | sign


@triton.jit
def _round_float(x, base, noise, dither, MANTISSA: tl.constexpr):
    """codec._round_float"""
    SHIFT: tl.constexpr = 15 - MANTISSA
    fixed = (_int(x) - base + ((2 * dither + 1) << (SHIFT - 7))) >> SHIFT
    return tl.minimum(tl.minimum(tl.maximum(fixed, 0), 0xFFFF) + noise, 0xFFFF) >> 8


@triton.jit
def _scale_of(largest, top):
    """A block's scale, and top / scale: codec.block_scale and codec.inverse."""
    scale = tl.where(largest >= 7.888609052210118e-31, largest, 0.0)
    safe = tl.where(scale > 0, scale, 1.0)
    return scale, tl.where(scale > 0, tl.math.div_rn(tl.zeros_like(scale) + top, safe), 0.0)


# -- the step -----------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["n", "first_block", "key_low", "key_high", "grad_limit"])
def _step(
    weight_ptr,
    extension_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    m_scale_ptr,
    v_scale_ptr,
    skipped_ptr,
    n,
    first_block,
    key_low,
    key_high,
    grad_limit,
    c_m,
    b_m,
    c_h,
    b_v,
    root_correction,
    eps,
    step_size,
    decay,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    EXTENDED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    HALVES: tl.constexpr = BLOCK // 64
    STOCHASTIC: tl.constexpr = (WEIGHT != 0) and (not EXTENDED)
    FIRST: tl.constexpr = 2 * HALVES if STOCHASTIC else 0  # draws that round weights
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    value = tl.arange(0, BLOCK)[None, :]
    at = row * BLOCK + value
    inside = at < n
    blocks = (n + BLOCK - 1) // BLOCK
    block = first_block + row.to(tl.int32)

    grad_bits = tl.load(grad_ptr + at, mask=inside, other=0)
    magnitude = grad_bits.to(tl.int32) & (0x7FFFFFFF if GRAD == 0 else 0x7FFF)
    bad = tl.max(magnitude, axis=1, keep_dims=True) > grad_limit
    there = row < blocks
    tl.atomic_add(skipped_ptr, tl.sum((bad & there).to(tl.int32)))
    write = inside & (bad == 0)
    write_block = there & (bad == 0)
    g = _widen(grad_bits, GRAD)

    # -- moments
    if BITS == 32:
        old_m = tl.load(m_ptr + at, mask=inside, other=0.0) * b_m
        old_v = tl.load(v_ptr + at, mask=inside, other=0.0) * b_v
    else:
        m_unit = tl.load(m_scale_ptr + row, mask=there, other=0.0) * b_m
        root_unit = tl.load(v_scale_ptr + row, mask=there, other=0.0) * b_v
        if BITS == 4:
            byte = row * 64 + _place(value % 64)
            nibble = (value // 64) * 4
            m_code = (tl.load(m_ptr + byte, mask=there, other=0).to(tl.int32) >> nibble) & 15
            v_code = (tl.load(v_ptr + byte, mask=there, other=0).to(tl.int32) >> nibble) & 15
            m_code = (m_code ^ 8) - 8
            level = ((1 << tl.abs(m_code)) - 1).to(tl.float32)
            level = tl.where(m_code < 0, -level, level)
            root = _float((v_code << 22) + 0x40000000)
        else:
            level = (tl.load(m_ptr + at, mask=inside, other=128).to(tl.int32) - 128).to(tl.float32)
            root = _float((tl.load(v_ptr + at, mask=inside, other=0).to(tl.int32) << 18) + 0x40000000)
        old_m = level * m_unit
        old_v = root * root * (root_unit * root_unit)
    h = g * c_h
    m = tl.fma(tl.zeros_like(g) + c_m, g, old_m)
    v = tl.fma(h, h, old_v)
    root = tl.math.sqrt_rn(v)
    ratio = tl.math.div_rn(m, tl.fma(tl.zeros_like(root) + root_correction, root, tl.zeros_like(root) + eps))

    # -- weight
    if STOCHASTIC or EXTENDED or BITS != 32:
        own, beside = _rounding_words(value, FIRST, block, key_low, key_high, FIRST + HALVES)
        lower, upper = own & 255, own >> 8
    weight_bits = tl.load(weight_ptr + at, mask=inside, other=0)
    if EXTENDED:
        w = _join(weight_bits, tl.load(extension_ptr + at, mask=inside, other=0), WEIGHT)
    else:
        w = _widen(weight_bits, WEIGHT)
    w = tl.fma(tl.zeros_like(w) + step_size, ratio, w * decay)
    if EXTENDED:
        out, extension = _split(w, lower ^ (beside >> 8), WEIGHT)
        tl.store(weight_ptr + at, out.to(tl.int16), mask=write)
        tl.store(extension_ptr + at, extension.to(tl.int8), mask=write)
    elif STOCHASTIC:
        words = _word(value % 32, value // 32, block, key_low, key_high, FIRST)
        tl.store(weight_ptr + at, _round_stochastic(w, words, WEIGHT).to(tl.int16), mask=write)
    else:
        tl.store(weight_ptr + at, _int(w), mask=write)

    # -- states
    if BITS == 32:
        tl.store(m_ptr + at, m, mask=write)
        tl.store(v_ptr + at, v, mask=write)
    else:
        TOP: tl.constexpr = 384.0 if BITS == 4 else 504.0
        MANTISSA: tl.constexpr = 1 if BITS == 4 else 5
        first_half = value % 64 < 32
        m_noise, v_noise = tl.where(first_half, lower, upper), tl.where(first_half, upper, lower)
        weyl = block.to(tl.uint32) * 0x9E3779B9 + key_high.to(tl.uint32, bitcast=True)
        m_dither, v_dither = ((weyl >> 20) & 63).to(tl.int32), (weyl >> 26).to(tl.int32)
        m_scale, m_inverse = _scale_of(tl.max(tl.abs(m), axis=1, keep_dims=True), 127.0)
        v_scale, v_inverse = _scale_of(tl.max(root, axis=1, keep_dims=True), TOP)
        tl.store(m_scale_ptr + row, m_scale, mask=write_block)
        tl.store(v_scale_ptr + row, v_scale, mask=write_block)
        v_code = _round_float(root * v_inverse, 0x40000000, v_noise, v_dither, MANTISSA)
        ones = tl.zeros_like(m) + 1.0
        if BITS == 4:
            level = _round_float(
                tl.fma(m_inverse + tl.zeros_like(m), tl.abs(m), ones), 0x3F800000, m_noise, m_dither, 0
            )
            m_code = tl.where(_int(m) < 0, -level, level) & 15
            # Both halves of a byte: the values 64 apart meet in a sum, where each one's bits are zero in the other's.
            m_byte = tl.sum(tl.reshape(m_code << nibble, (ROWS, 2, 64)), axis=1)
            v_byte = tl.sum(tl.reshape(v_code << nibble, (ROWS, 2, 64)), axis=1)
            to = row * 64 + _place(tl.arange(0, 64)[None, :])
            tl.store(m_ptr + to, m_byte.to(tl.uint8), mask=write_block)
            tl.store(v_ptr + to, v_byte.to(tl.uint8), mask=write_block)
        else:
            shift = (m_dither.to(tl.float32) - 31.5) * 0.015625
            # Adding 1.5 * 2**23 leaves the nearest integer (ties to even) in the last bits of the sum.
            fixed = _int(tl.fma(m_inverse * 256.0 + tl.zeros_like(m), m, shift + tl.zeros_like(m)) + 12582912.0)
            m_code = ((fixed - 0x4B400000 + m_noise) >> 8) + 128
            tl.store(m_ptr + at, m_code.to(tl.uint8), mask=write)
            tl.store(v_ptr + at, v_code.to(tl.uint8), mask=write)
