"""The kernel of ``triton_adam``: one AdamW step of a tensor, with the bits of ``kernels.adam``, its oracle.

A program is one warp and steps a tile of a few blocks. What a thread does is what counts: the kernel is bound by its
instructions. A block is one pair of halves or two, and value ``c + 32 a + 64 b`` of a pair lies in the tile, ``[rows,
pairs, 32, 2, 2]``, at ``[c, a, b]``. The last two dimensions are made by ``tl.join``, so that a thread holds all of
them, and of ``c`` it holds 8 in a row, which it loads at once. Whatever is shared is then shared within one thread: a
byte by two 4-bit codes, a word of noise by values 32 apart, and the four lanes of noise that its 32 values need.
Threads exchange nothing but the blocks' maxima.

Nothing may be contracted into a fused operation that is not written as one: the kernels are launched with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl


def signed(word: int) -> int:
    """The last 32 bits as a signed number, which Triton takes as one type whatever its size."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


# -- tiles ----------------------------------------------------------------------------------------------------------
@triton.jit
def _tile(q00, q10, q01, q11):
    """A tile of its quarters ``[rows, pairs, 32]``, q with a and b."""
    return tl.join(tl.join(q00, q10), tl.join(q01, q11))


@triton.jit
def _load(ptr, at, left, OTHER: tl.constexpr):
    """A tile of which ``left`` values are there. Where that is all of them, and constant, there are no masks."""
    q00 = tl.load(ptr + at, mask=at < left, other=OTHER)
    q10 = tl.load(ptr + at + 32, mask=at + 32 < left, other=OTHER)
    q01 = tl.load(ptr + at + 64, mask=at + 64 < left, other=OTHER)
    q11 = tl.load(ptr + at + 96, mask=at + 96 < left, other=OTHER)
    return _tile(q00, q10, q01, q11)


@triton.jit
def _store(ptr, at, left, tile, write):
    near, far = tl.split(tile)
    q00, q10 = tl.split(near)
    q01, q11 = tl.split(far)
    tl.store(ptr + at, q00, mask=write & (at < left))
    tl.store(ptr + at + 32, q10, mask=write & (at + 32 < left))
    tl.store(ptr + at + 64, q01, mask=write & (at + 64 < left))
    tl.store(ptr + at + 96, q11, mask=write & (at + 96 < left))


@triton.jit
def _largest(tile):
    """Of each block, ``[rows, 1, 1, 1, 1]``. Of each pair first: over both at once the compiler reduces wrongly."""
    pairs = tl.max(tl.reshape(tile, (tile.shape[0] * tile.shape[1], 128)), axis=1)
    return tl.max(tl.reshape(pairs, (tile.shape[0], tile.shape[1])), axis=1)[:, None, None, None, None]


@triton.jit
def _spread(x, tile):
    """A number, or one a block, for every value of a tile: the operands of tl.fma are of one shape."""
    return tl.zeros_like(tile) + x


# -- random bits: codec.Noise ---------------------------------------------------------------------------------------
@triton.jit
def _lanes(block, key_low, key_high):
    """A block's lanes, ``[rows, 1, 4, 2, 2]`` in their order: a thread holds four."""
    lane = tl.reshape(tl.arange(0, 16), (1, 1, 4, 2, 2))
    x = (block * 16 + lane).to(tl.uint32) * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) ^ key_high.to(tl.uint32, bitcast=True)


@triton.jit
def after_draws(x, DRAWS: tl.constexpr):
    for _ in tl.static_range(DRAWS):
        x = x ^ (x << 13)
        x = x ^ (x >> 17)
        x = x ^ (x << 5)
    return x


@triton.jit
def _each_pair(x, EACH: tl.constexpr, PAIRS: tl.constexpr):
    """Lanes for each pair, of which every one takes EACH draws before the next."""
    if PAIRS == 2:
        x = tl.where(tl.reshape(tl.arange(0, 2), (1, 2, 1, 1, 1)) == 0, x, after_draws(x, EACH))
    return x


@triton.jit
def _words(x, MASK: tl.constexpr):
    """The last bits of every half of a lane, ``[rows, pairs, 32]``."""
    words = tl.join(x & MASK, (x >> 16) & MASK).to(tl.int32, bitcast=True)
    return tl.reshape(words, (x.shape[0], x.shape[1], 32))


@triton.jit
def _weight_words(x):
    """16 bits for every value of a tile, of four draws."""
    y, z = after_draws(x, 1), after_draws(x, 2)
    return _tile(_words(x, 0xFFFF), _words(y, 0xFFFF), _words(z, 0xFFFF), _words(after_draws(z, 1), 0xFFFF))


@triton.jit
def _half_bytes(x):
    """Of a half's draw: lower bytes, upper bytes, and those for the extensions of its first 32 values and its last."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    beside = tl.join(odd, tl.join(third, first))  # to every lane the next one, the first one to the last
    upper = x >> 8
    return _words(x, 255), _words(upper, 255), _words(x ^ upper, 255), _words(x ^ (beside >> 8), 255)


@triton.jit
def _rounding_bytes(x):
    """8 bits for every value of a tile, of two draws: for m, for v and for the extension."""
    lower0, upper0, first0, rest0 = _half_bytes(x)
    lower1, upper1, first1, rest1 = _half_bytes(after_draws(x, 1))
    m, v = _tile(lower0, upper0, lower1, upper1), _tile(upper0, lower0, upper1, lower1)
    return m, v, _tile(first0, rest0, first1, rest1)


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
        value = word << 16
        return _float(value + tl.where(_float(value) == 0, 0, ext << 8))
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
def _round_float(x, base, noise, dither, MANTISSA: tl.constexpr, POSITIVE: tl.constexpr):
    """codec._round_float, whose two shifts are one here; what is finite never comes to pass the last code.

    POSITIVE: x is known not to lie under the first code.
    """
    SHIFT: tl.constexpr = 15 - MANTISSA
    fixed = _int(x) + (((2 * dither + 1) << (SHIFT - 7)) - base)
    if not POSITIVE:
        fixed = tl.maximum(fixed, 0)
    return (fixed + (noise << SHIFT)) >> (SHIFT + 8)


@triton.jit
def _minus(x):
    return x * -1.0  # "-x" is 0 - x to Triton, an instruction more


INTERPRETED = tl.constexpr(not isinstance(_minus, triton.JITFunction))  # without a GPU, in tests


@triton.jit
def _root(x, QUICK: tl.constexpr):
    """The square root, rounded to nearest. QUICK: of x known to be 0 or in 2**-100 .. 2**60."""
    if QUICK:  # what the compiler makes of sqrt_rn, too, but for the branch to all other x, which every value would pay
        y = tl.rsqrt(tl.maximum(x, 7.888609052210118e-31))
        root = x * y
        return tl.fma(tl.fma(_minus(root), root, x), 0.5 * y, root)
    else:
        return tl.math.sqrt_rn(x)


@triton.jit
def _ratio(x, y, QUICK: tl.constexpr):
    """x / y, rounded to nearest. QUICK: known to lie, with x, y and 1 / y, well within the normal numbers, or x = 0."""
    if QUICK:  # as above; Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990
        if INTERPRETED:
            r = 1.0 / y
        else:  # off by one unit of the last place at most
            r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [y], tl.float32, True, 1)
        r = tl.fma(r, tl.fma(_minus(y), r, _spread(1.0, y)), r)
        ratio = x * r
        # A remainder of 0 times a negative number leaves a ratio of -0 as it is.
        return tl.fma(tl.fma(y, ratio, _minus(x)), _minus(r), ratio)
    else:
        return tl.math.div_rn(x, y)


# -- the step -----------------------------------------------------------------------------------------------------
@triton.jit
def _load_codes(ptr, there):
    """4-bit codes as ``[rows, 1, 32, 2]`` bytes. ``ptr``: where the first values' ones lie, the others' are 8 on."""
    first, other = tl.load(ptr, mask=there, other=0), tl.load(ptr + 8, mask=there, other=0)
    return tl.join(first, other).to(tl.int32)


@triton.jit
def _store_codes(ptr, codes, write):
    low, high = tl.split(codes)
    first, other = tl.split((low | (high << 4)).to(tl.uint8))
    tl.store(ptr, first, mask=write)
    tl.store(ptr + 8, other, mask=write)


@triton.jit
def _decode4(m_bytes, v_bytes, m_unit):
    """Old m, and the tiny float of sqrt(v)."""
    code = tl.join(m_bytes << 28, (m_bytes & 0xF0) << 24)  # in the uppermost bits
    exponent = (tl.abs(code).to(tl.uint32, bitcast=True) >> 5).to(tl.int32, bitcast=True)
    power, unit = _float(exponent + 0x3F800000), _spread(m_unit, code.to(tl.float32))
    magnitude = tl.fma(power, unit, _minus(unit))  # (power - 1) * unit, rounded once
    root = _float(tl.join((v_bytes & 15) << 22, (v_bytes & 0xF0) << 18) + 0x40000000)
    return _float(_int(magnitude) | (code & -0x80000000)), root


@triton.jit
def _encode_m4(m, inverse, noise, dither):
    level = _round_float(tl.fma(_spread(inverse, m), tl.abs(m), _spread(1.0, m)), 0x3F800000, noise, dither, 0, True)
    return tl.where(_int(m) < 0, -level, level) & 15


@triton.jit
def _encode_m8(m, inverse, noise, dither):
    shift = (dither.to(tl.float32) - 31.5) * 0.015625
    # Adding 1.5 * 2**23 leaves the nearest integer (ties to even) in the last bits of the sum.
    fixed = _int(tl.fma(_spread(inverse * 256.0, m), m, _spread(shift, m)) + 12582912.0)
    return ((fixed - 0x4B400000 + noise) >> 8) + 128


@triton.jit
def _scale_of(largest, top, QUICK: tl.constexpr):
    """A block's scale, and top / scale: codec.block_scale and codec.inverse."""
    scale = tl.where(largest >= 7.888609052210118e-31, largest, 0.0)
    safe = tl.where(scale > 0, scale, 1.0)
    return scale, tl.where(scale > 0, _ratio(_spread(top, safe), safe, QUICK), 0.0)


@triton.jit
def _results(m, v, m_top, v_top, correction, eps, TOP: tl.constexpr, QUICK: tl.constexpr):
    """sqrt(v), the weights' update, and each block's scale of m and its inverse, and those of sqrt(v)."""
    root = _root(v, QUICK)
    ratio = _ratio(m, tl.fma(_spread(correction, root), root, _spread(eps, root)), QUICK)
    m_scale, m_inverse = _scale_of(m_top, 127.0, QUICK)
    v_scale, v_inverse = _scale_of(_root(v_top, QUICK), TOP, QUICK)
    return root, ratio, m_scale, m_inverse, v_scale, v_inverse


@triton.jit
def _all_quick(m, v, m_top, v_top, v_usual, correction, eps, CHECK_V: tl.constexpr):
    """Whether the quick roots and ratios of a whole tile are right.

    Each m must be 0 or in 2**-100 .. 2**60, each v 0 or in 2**-100 .. 2**30, and the denominators in 2**-60 .. 2**26.
    ``v_usual`` says for each block that none of its v is too small, unless CHECK_V.
    """
    LEAST: tl.constexpr = 27 << 24  # twice the bits of 2**-100: the sign is shifted out, and 0 - 1 is a large number
    least = (_int(m) << 1).to(tl.uint32, bitcast=True) - 1
    if CHECK_V:
        least = tl.minimum(least, (_int(v) << 1).to(tl.uint32, bitcast=True) - 1)
    least = tl.min(tl.reshape(least, (m.shape[0], m.numel // m.shape[0])), axis=1)[:, None, None, None, None]
    quick = (least >= LEAST - 1) & (m_top <= 1.152921504606847e18) & (v_top <= 1073741824.0) & v_usual
    quick = quick & (eps >= 8.673617379884035e-19) & (eps <= 1.0) & (correction <= 1024.0)
    return tl.min(tl.reshape(quick.to(tl.int32), (m.shape[0],))) == 1


@triton.jit(do_not_specialize=["n", "first_tile", "first_block", "key_low", "key_high", "grad_limit"])
def adam_kernel(
    weight_ptr,
    extension_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    m_scale_ptr,
    v_scale_ptr,
    skipped_ptr,
    n,
    first_tile,
    first_block,
    key_low,
    key_high,
    grad_limit,
    c_m,
    b_m,
    c_h,
    b_v,
    correction,
    eps,
    step_size,
    decay,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    EXTENDED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    PAIRS: tl.constexpr = BLOCK // 128
    TOP: tl.constexpr = 384.0 if BITS == 4 else 504.0
    STOCHASTIC: tl.constexpr = (WEIGHT != 0) and (not EXTENDED)
    FIRST: tl.constexpr = 4 * PAIRS if STOCHASTIC else 0  # draws that round weights
    tile = first_tile + tl.program_id(0)
    start = tile.to(tl.int64) * (ROWS * BLOCK)
    left = ROWS * BLOCK if WHOLE else (n - start).to(tl.int32)
    row = tl.arange(0, ROWS)[:, None, None]
    c = tl.arange(0, 32)[None, None, :]
    at = row * BLOCK + tl.arange(0, PAIRS)[None, :, None] * 128 + c
    there = row * BLOCK < left
    block = (first_block + tile * ROWS + row)[:, :, :, None, None]

    # -- loads: early, so that a program waits for memory once
    g = _widen(_load(grad_ptr + start, at, left, 0), GRAD)
    w = _load(weight_ptr + start, at, left, 0)
    w = _join(w, _load(extension_ptr + start, at, left, 0), WEIGHT) if EXTENDED else _widen(w, WEIGHT)
    g_top = _largest(_int(g) & 0x7FFFFFFF)
    if BITS == 32:
        old_m = _load(m_ptr + start, at, left, 0) * b_m
        old_v = _load(v_ptr + start, at, left, 0) * b_v
        v_usual = g_top >= 0
    else:
        scales = tile.to(tl.int64) * ROWS + row
        m_unit = tl.load(m_scale_ptr + scales, mask=there, other=0.0)[:, :, :, None, None] * b_m
        root_unit = tl.load(v_scale_ptr + scales, mask=there, other=0.0)[:, :, :, None, None] * b_v
        if BITS == 4:
            codes = start // 2 + (row * 64 + c // 8 * 16 + c % 8)
            m_bytes, v_bytes = _load_codes(m_ptr + codes, there), _load_codes(v_ptr + codes, there)
            old_m, root = _decode4(m_bytes, v_bytes, m_unit)
        else:
            old_m = (_load(m_ptr + start, at, left, 128).to(tl.int32) - 128).to(tl.float32) * m_unit
            root = _float((_load(v_ptr + start, at, left, 0).to(tl.int32) << 18) + 0x40000000)
        old_v = root * root * (root_unit * root_unit)
        # The least code is 2, and the square of twice 2**-51 is 2**-100.
        v_usual = (root_unit >= 4.440892098500626e-16) | ((root_unit == 0) & (g_top == 0))

    # -- arithmetic
    h = g * c_h
    m = tl.fma(_spread(c_m, g), g, old_m)
    v = tl.fma(h, h, old_v)
    m_top, v_top = _largest(tl.abs(m)), _largest(v)
    if _all_quick(m, v, m_top, v_top, v_usual, correction, eps, BITS == 32):
        root, ratio, m_scale, m_inverse, v_scale, v_inverse = _results(m, v, m_top, v_top, correction, eps, TOP, True)
    else:
        root, ratio, m_scale, m_inverse, v_scale, v_inverse = _results(m, v, m_top, v_top, correction, eps, TOP, False)
    w = tl.fma(_spread(step_size, w), ratio, w * decay)

    # -- stores, but of blocks with bad gradients
    bad = tl.reshape(g_top > grad_limit, (ROWS, 1, 1))
    count = tl.sum(tl.reshape(bad.to(tl.int32), (ROWS,)))
    tl.atomic_add(skipped_ptr, count, mask=count > 0, sem="relaxed")
    write, write_block = bad == 0, there & (bad == 0)
    if STOCHASTIC or EXTENDED or BITS != 32:
        lanes = _lanes(block, key_low, key_high)
        m_noise, v_noise, w_noise = _rounding_bytes(_each_pair(after_draws(lanes, FIRST), 2, PAIRS))
    if EXTENDED:
        out, extension = _split(w, w_noise, WEIGHT)
        _store(weight_ptr + start, at, left, out.to(tl.int16), write)
        _store(extension_ptr + start, at, left, extension.to(tl.int8), write)
    elif STOCHASTIC:
        out = _round_stochastic(w, _weight_words(_each_pair(lanes, 4, PAIRS)), WEIGHT)
        _store(weight_ptr + start, at, left, out.to(tl.int16), write)
    else:
        _store(weight_ptr + start, at, left, _int(w), write)
    if BITS == 32:
        _store(m_ptr + start, at, left, m, write)
        _store(v_ptr + start, at, left, v, write)
    else:
        tl.store(m_scale_ptr + scales, tl.reshape(m_scale, (ROWS, 1, 1)), mask=write_block)
        tl.store(v_scale_ptr + scales, tl.reshape(v_scale, (ROWS, 1, 1)), mask=write_block)
        weyl = block.to(tl.uint32) * 0x9E3779B9 + key_high.to(tl.uint32, bitcast=True)
        m_dither, v_dither = ((weyl >> 20) & 63).to(tl.int32), (weyl >> 26).to(tl.int32)
        v_code = _round_float(root * v_inverse, 0x40000000, v_noise, v_dither, 1 if BITS == 4 else 5, False)
        if BITS == 4:
            _store_codes(m_ptr + codes, _encode_m4(m, m_inverse, m_noise, m_dither), write_block)
            _store_codes(v_ptr + codes, v_code, write_block)
        else:
            m_code = _encode_m8(m, m_inverse, m_noise, m_dither)
            _store(m_ptr + start, at, left, m_code.to(tl.uint8), write)
            _store(v_ptr + start, at, left, v_code.to(tl.uint8), write)
