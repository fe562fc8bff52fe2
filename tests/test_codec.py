"""The formats, against their definitions: every code, every 16-bit weight, every noise value."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from hf_lowmem import codec
from hf_lowmem.kernels.adam import AdamConstants, AdamTensor, adam_step

STATES = pytest.mark.parametrize("state", [codec.STATE4, codec.STATE8], ids=["4 bits", "8 bits"])
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def every_word(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit type."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def finite_words(dtype: torch.dtype) -> Tensor:
    words = every_word(dtype)
    return words[words.isfinite()]


def constant_noise(state: codec.StateCodec, value: int) -> Tensor:
    return torch.full((1, state.block), value, dtype=torch.int32)


# -- moments --------------------------------------------------------------------------------------------------------
@STATES
@pytest.mark.parametrize("blocks", [1, 3])
def test_pack_and_unpack_every_code(state: codec.StateCodec, blocks: int) -> None:
    n = blocks * state.block
    codes = (torch.arange(n, dtype=torch.int32) * 7 % 2**state.bits).view(blocks, state.block)
    data = state.pack(codes, n)
    assert data.numel() == state.nbytes(n)
    assert torch.equal(state.unpack(data, n), codes)


@STATES
@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_sizes(state: codec.StateCodec, n: int) -> None:
    codes = torch.ones(state.blocks(n), state.block, dtype=torch.int32)
    data = state.pack(codes, n)
    assert data.numel() == state.nbytes(n)
    assert torch.equal(state.unpack(data, n).flatten()[:n], torch.ones(n, dtype=torch.int32))


def test_four_bit_layout() -> None:
    codes = torch.zeros(1, 128, dtype=torch.int32)
    codes[0, 5], codes[0, 69], codes[0, 32 + 17] = 3, 12, 7
    data = codec.STATE4.pack(codes, 128)
    assert data[5].item() == 3 | 12 << 4
    assert data[17 // 8 * 16 + 8 + 17 % 8].item() == 7
    assert data.count_nonzero() == 2


@STATES
def test_every_m_code_is_a_fixed_point(state: codec.StateCodec) -> None:
    """What a code stands for is encoded as that code whatever the noise, as long as the scale stays."""
    levels = m_levels(state)
    m = torch.zeros(1, state.block)
    m[0, : len(levels)] = levels * (0.37 / codec.LEVELS)
    for noise in (0, 128, 255):
        data, scale = state.encode_m(m, constant_noise(state, noise), state.block)
        decoded = state.decode_m(data, state.block)[0, : len(levels)]
        assert torch.equal(decoded, levels)
        assert scale.item() == m.max().item()


@STATES
def test_every_root_code_is_a_fixed_point(state: codec.StateCodec) -> None:
    values = state.decode_root(torch.arange(2**state.bits, dtype=torch.uint8).repeat(128)[: state.nbytes(256)], 256)
    values = values.flatten().unique()
    assert values.min() == 2.0
    assert values.max() == state.top
    if state.bits == 8:
        assert len(values) == 256
    block = values.repeat(state.block)[: state.block].view(1, -1)
    block[0, -1] = state.top
    for noise in (0, 255):
        data, scale = state.encode_root(block * 0.25, constant_noise(state, noise), state.block)
        assert torch.equal(state.decode_root(data, state.block), block)
        assert scale.item() == 0.25 * state.top


def test_four_bit_roots_are_those_of_e3m1() -> None:
    codes = state_codes(codec.STATE4)
    expected = torch.tensor([2.0 * 2**e * (1 + f / 2) for e in range(8) for f in range(2)])
    assert torch.equal(codes, expected)
    squares = codes * codes  # the kernels' tables hold the squares as bf16
    assert torch.equal(squares.bfloat16().float(), squares)


def state_codes(state: codec.StateCodec) -> Tensor:
    """The values of all codes of sqrt(v), ascending."""
    n = 2**state.bits
    codes = torch.arange(state.block, dtype=torch.int32).view(1, -1) % n
    return state.decode_root(state.pack(codes, state.block), state.block).flatten()[:n]


def m_levels(state: codec.StateCodec) -> Tensor:
    """What the codes of m stand for, ascending, in units of scale / 127."""
    positive = torch.arange(128.0) if state.bits == 8 else 2.0 ** torch.arange(8) - 1
    return torch.cat([-positive.flip(0)[:-1], positive])


def neighbours(levels: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """For every value of x the level under it and the level over it (the same one where it is a level)."""
    values = x.flatten().double()
    upper = levels[torch.searchsorted(levels, values).clamp_max(len(levels) - 1)]
    return levels[(torch.searchsorted(levels, values, right=True) - 1).clamp_min(0)], upper


def expectation(state: codec.StateCodec, x: Tensor, moment: str) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, least, largest) decoded value over all 256 noise values; x is ``[1, block]``."""
    outcomes = []
    for noise in range(256):
        if moment == "m":
            data, scale = state.encode_m(x, constant_noise(state, noise), state.block)
            outcomes.append(state.decode_m(data, state.block).double() * scale.double() / codec.LEVELS)
        else:
            data, scale = state.encode_root(x, constant_noise(state, noise), state.block)
            outcomes.append(state.decode_root(data, state.block).double() * scale.double() / state.top)
    every = torch.stack(outcomes)
    return every.mean(0), every.amin(0), every.amax(0)


@STATES
def test_m_is_rounded_to_its_neighbours_without_bias(state: codec.StateCodec) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, state.block)
    mean, least, largest = expectation(state, x, "m")
    lower, upper = neighbours(m_levels(state).double() * (x.abs().max().double() / codec.LEVELS), x)
    step = upper - lower
    assert ((mean - x).flatten().abs() <= step / 512 + 1e-6).all()  # the fixed point's last place is step / 256
    assert (least.flatten() >= lower - step / 200 - 1e-6).all()
    assert (largest.flatten() <= upper + step / 200 + 1e-6).all()


@STATES
def test_root_is_rounded_to_its_neighbours_without_bias(state: codec.StateCodec) -> None:
    torch.manual_seed(0)
    x = torch.rand(1, state.block) * 0.9 + 0.1
    mean, least, largest = expectation(state, x, "v")
    codes = state_codes(state).double() * (x.max().double() / state.top)
    lower, upper = neighbours(codes, x)
    step = (upper - lower).clamp_min(codes[1] - codes[0])
    assert ((mean - x).flatten().abs() <= step / 500).all()
    assert (least.flatten() >= lower - step / 200).all()
    assert (largest.flatten() <= upper + step / 200).all()


@STATES
def test_small_roots_never_become_zero(state: codec.StateCodec) -> None:
    x = torch.full((1, state.block), 1e-9)
    x[0, 0] = 1.0
    data, scale = state.encode_root(x, constant_noise(state, 0), state.block)
    assert (state.decode_root(data, state.block) >= 2.0).all()
    assert scale.item() == 1.0


@STATES
@pytest.mark.parametrize("largest", [0.0, 1e-45, 2.0**-101])
def test_blocks_of_next_to_nothing_are_zero(state: codec.StateCodec, largest: float) -> None:
    x = torch.full((1, state.block), largest)
    for encode in (state.encode_m, state.encode_root):
        data, scale = encode(x, constant_noise(state, 255), state.block)
        assert scale.item() == 0.0
        assert data.unique().numel() == 1
    assert torch.equal(
        state.decode_m(state.encode_m(x, constant_noise(state, 255), state.block)[0], state.block), x * 0
    )


@STATES
@pytest.mark.parametrize("exponent", range(-98, 128, 19))
def test_no_code_leaves_its_range(state: codec.StateCodec, exponent: int) -> None:
    """The largest value keeps the last code whatever the noise and however the division was rounded."""
    torch.manual_seed(exponent)
    for _ in range(20):
        x = (torch.rand(1, state.block) * 0.99 + 0.01) * 2.0**exponent
        at = x.argmax()
        for noise in (0, 255):
            data, _ = state.encode_m(x, constant_noise(state, noise), state.block)
            assert state.decode_m(data, state.block)[0, at] == codec.LEVELS
            data, _ = state.encode_m(-x, constant_noise(state, noise), state.block)
            assert state.decode_m(data, state.block)[0, at] == -codec.LEVELS
            data, _ = state.encode_root(x, constant_noise(state, noise), state.block)
            assert state.decode_root(data, state.block)[0, at] == state.top


# -- master weights -------------------------------------------------------------------------------------------------
@HALVES
def test_a_weight_alone_is_its_own_master(dtype: torch.dtype) -> None:
    words = finite_words(dtype)
    master = codec.join_master(words, torch.zeros(len(words), dtype=torch.int8))
    assert torch.equal(master, words.float())
    weight, extension = codec.split_master(master, dtype)
    assert torch.equal(weight.view(torch.int16), words.view(torch.int16))
    assert not extension.any()


@HALVES
@pytest.mark.parametrize("extension", [-128, -127, -64, -1, 1, 63, 127])
def test_every_master_survives_a_round_trip(dtype: torch.dtype, extension: int) -> None:
    words = finite_words(dtype)
    words = words[(words != 0) & (words.float().abs() < torch.finfo(dtype).max)]
    master = codec.join_master(words, torch.full((len(words),), extension, dtype=torch.int8))
    again = codec.join_master(*codec.split_master(master, dtype))
    assert torch.equal(again, master)


@HALVES
def test_splitting_rounds_to_nearest(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(200_000) * torch.exp2(torch.randint(-12, 12, (200_000,)).float())
    weight, extension = codec.split_master(x, dtype)
    master = codec.join_master(weight, extension)
    bits = 16 if dtype is torch.bfloat16 else 19
    unit = torch.exp2(torch.floor(torch.log2(x.abs().double())).clamp_min(-126 if bits == 16 else -14) - bits + 1)
    # Half a unit, and a little for the subnormals of fp16, which are first rounded to those of fp32.
    assert ((master.double() - x.double()).abs() <= unit * 0.52).all()
    # The weight by itself is within half a unit of the master: what a forward pass sees is the nearest 16-bit number.
    nearest = master.to(dtype)
    ulps = (nearest.view(torch.int16).int() - weight.view(torch.int16).int()).abs()
    assert ulps.max() <= 1  # one only at exact ties, which `.to` takes to even
    ties = (master.double() - weight.double()).abs() == (master.double() - nearest.double()).abs()
    assert ties.all()


@HALVES
@pytest.mark.parametrize("extension", [-128, -1, 1, 127])
def test_a_zeroed_weight_does_not_change_its_sign(dtype: torch.dtype, extension: int) -> None:
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    master = codec.join_master(zeros, torch.full((2,), extension, dtype=torch.int8))
    assert torch.equal(master.signbit(), zeros.signbit())
    assert (master.abs() < 1e-7).all()


@HALVES
def test_stochastic_rounding_has_the_exact_mean(dtype: torch.dtype) -> None:
    """Over all 65,536 noise words the mean is the number itself, and only its two neighbours come out."""
    torch.manual_seed(2)
    words = torch.arange(65536, dtype=torch.int32)
    for x in torch.randn(20) * 3:
        out = codec.round_stochastic(x.expand(65536).contiguous(), dtype, words).double()
        unit = (out.max() - out.min()).item()
        assert out.unique().numel() <= 2
        assert abs(out.mean().item() - x.item()) <= max(unit, 1e-9) / 2**12
        assert out.min() <= x
        assert out.max() >= x


@HALVES
def test_stochastic_rounding_leaves_what_fits(dtype: torch.dtype) -> None:
    words = every_word(dtype)
    words = words[~words.isnan()]
    for noise in (0, 1, 65535):
        out = codec.round_stochastic(words.float(), dtype, torch.full((len(words),), noise, dtype=torch.int32))
        assert torch.equal(out.view(torch.int16), words.view(torch.int16))


# -- random bits ----------------------------------------------------------------------------------------------------
def scalar_noise(key: int, block: int, draws: int) -> list[list[int]]:
    """The definition, one 32-bit word at a time."""
    mask, lanes = 2**32 - 1, []
    for lane in range(16):
        x = ((16 * block + lane) * 0x9E3779B9 + (key & mask)) & mask
        x = (x ^ x >> 16) * 0x85EBCA6B & mask
        x = (x ^ x >> 13) * 0xC2B2AE35 & mask
        lanes.append((x ^ x >> 16) ^ key >> 32)
    out = []
    for _ in range(draws):
        out.append(list(lanes))
        for lane in range(16):
            x = lanes[lane]
            x = (x ^ x << 13) & mask
            x ^= x >> 17
            lanes[lane] = (x ^ x << 5) & mask
    return out


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1, 0x0123456789ABCDEF])
def test_noise_is_what_it_is_defined_to_be(key: int) -> None:
    noise = codec.Noise(key, 3, first=5)
    words, (m, v, extension) = noise.weight_words(2), noise.rounding_bytes(2)
    m_dither, v_dither = noise.dithers()
    for i, block in enumerate((5, 6, 7)):
        draws = scalar_noise(key, block, 6)
        assert words[i].tolist() == [w for draw in draws[:4] for x in draw for w in (x & 0xFFFF, x >> 16)]
        pairs = [(w & 255, w >> 8) for draw in draws[4:] for x in draw for w in (x & 0xFFFF, x >> 16)]
        for j in range(128):
            word, first = j // 64 * 32 + j % 32, j % 64 < 32
            lower, upper = pairs[word]
            assert (m[i, j], v[i, j]) == ((lower, upper) if first else (upper, lower))
            assert extension[i, j] == lower ^ (upper if first else pairs[word // 8 * 8 + (word + 2) % 8][1])
        word = (block * 0x9E3779B9 + (key >> 32)) % 2**32
        assert (m_dither[i].item(), v_dither[i].item()) == (word >> 20 & 63, word >> 26)


def test_noise_of_a_part_is_that_of_the_whole() -> None:
    whole, part = codec.Noise(99, 10), codec.Noise(99, 4, first=3)
    assert torch.equal(whole.draw()[3:7], part.draw())
    for a, b in zip(whole.dithers(), part.dithers(), strict=True):
        assert torch.equal(a[3:7], b)


def test_noise_is_even_and_uncorrelated() -> None:
    noise = codec.Noise(codec.tensor_key(0, 1, 2), 4096)
    m, v, extension = noise.rounding_bytes(2)
    for x in (m, v, extension):
        assert abs(x.double().mean().item() - 127.5) < 0.5  # its standard error is 0.1
        assert abs(x.double().var(unbiased=False).item() / ((256**2 - 1) / 12) - 1) < 0.01
        counts = torch.bincount(x.flatten(), minlength=256).double()
        expected = counts.mean()
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * math.sqrt(2 * 255)
    limit = 5 / math.sqrt(m.numel()) * (256**2 / 12)
    for a, b in ((m, v), (m, extension), (v, extension)):
        assert abs(((a.double() - 127.5) * (b.double() - 127.5)).mean().item()) < limit
    for x in (m, v, extension):  # of two values, at any distance within a half, and of the same ones in two blocks
        centred = x.double() - 127.5
        assert abs((centred[:-1] * centred[1:]).mean().item()) < limit
        for distance in range(1, 64):
            assert abs((centred[:, :-distance] * centred[:, distance:]).mean().item()) < 1.5 * limit


def test_keys_differ() -> None:
    keys = {codec.tensor_key(seed, step, index) for seed in range(10) for step in range(10) for index in range(10)}
    assert len(keys) == 1000
    assert all(0 <= key < 2**64 for key in keys)


# -- arithmetic -----------------------------------------------------------------------------------------------------
def nearest_float32(x: Fraction) -> float:
    """The fp32 number nearest to a rational, ties to even; by bisection over all fp32 numbers."""
    if x < 0:
        return -nearest_float32(-x)
    low, high = 0, 0x7F800000  # bit patterns: low <= x < high
    top = Fraction(2) ** 128
    value = lambda bits: top if bits == 0x7F800000 else Fraction(struct.unpack("f", struct.pack("I", bits))[0])  # noqa: E731
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= x else (low, middle)
    below, above = x - value(low), value(high) - x
    bits = low if below < above or (below == above and low % 2 == 0) else high
    return struct.unpack("f", struct.pack("I", bits))[0]


def nasty_triples(count: int) -> list[tuple[float, float, float]]:
    """Products and addends that cancel, tie, underflow or lie far apart."""
    rng = random.Random(3)

    def number(exponent: int) -> float:
        mantissa = rng.choice([1.0, 1 + 2**-23, 2 - 2**-23, 1 + rng.randrange(2**23) / 2**23, 1 + rng.randrange(8) / 8])
        return rng.choice([-1, 1]) * mantissa * 2.0**exponent

    triples = []
    for _ in range(count):
        e, f = rng.randrange(-70, 50), rng.randrange(-70, 50)
        a, b = number(e), number(f)
        kind = rng.randrange(4)
        if kind == 0:  # an addend that all but cancels the product
            c = -struct.unpack("f", struct.pack("f", a * b))[0]
        elif kind == 1:  # a product near half a unit of the addend
            c = number(max(-126, min(126, e + f + 24)))
        elif kind == 2:
            c = number(max(-126, min(126, e + f + rng.randrange(-30, 60))))
        else:
            c = rng.choice([0.0, -0.0, 2.0**-149, -(2.0**-126)])
        triples.append((a, b, c))
    return triples


def test_fma_is_rounded_once() -> None:
    triples = nasty_triples(4000)
    triples += [(2.0**-75, 2.0**-75, 2.0**-149), (1.5 * 2.0**-75, 2.0**-75, 0.0), (3.0, 2.0**-149, 2.0**-149)]
    a, b, c = (torch.tensor(column, dtype=torch.float32) for column in zip(*triples, strict=True))
    got = codec.fma(a, b, c).tolist()
    for (x, y, z), value in zip(triples, got, strict=True):
        assert value == nearest_float32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)


def test_fma_of_what_is_not_finite() -> None:
    inf, nan = math.inf, math.nan
    cases = [(inf, 1.0, 1.0), (inf, 0.0, 1.0), (1.0, 1.0, -inf), (inf, 1.0, -inf), (nan, 1.0, 1.0), (3e38, 3e38, 1.0)]
    for a, b, c in cases:
        got = codec.fma(torch.tensor(a), torch.tensor(b), torch.tensor(c)).item()
        expected = torch.tensor(a * b + c).item()  # in fp32: the last one overflows
        assert got == expected or (math.isnan(got) and math.isnan(expected))


# -- the whole step -------------------------------------------------------------------------------------------------
def test_fp32_states_follow_torchs_adamw() -> None:
    torch.manual_seed(4)
    n, lr, betas, eps, decay = 1000, 1e-2, (0.9, 0.99), 1e-8, 0.1
    reference = torch.nn.Parameter(torch.randn(n))
    optimizer = torch.optim.AdamW([reference], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    weight, m, v = reference.detach().clone(), torch.zeros(n), torch.zeros(n)
    for step in range(1, 51):
        grad = torch.randn(n) * 0.1 ** (step % 3)
        reference.grad = grad.clone()
        optimizer.step()
        constants = AdamConstants.of(32, step, lr, *betas, eps, decay)
        assert adam_step([AdamTensor(weight, grad, m, v, None, None, 32, constants)]) == 0
    state = optimizer.state[reference]
    unit = torch.finfo(torch.float32).eps
    assert ((m - state["exp_avg"]).abs() <= 8 * unit * state["exp_avg"].abs().max()).all()
    assert ((v - state["exp_avg_sq"]).abs() <= 60 * unit * state["exp_avg_sq"]).all()
    # A step moves a weight by about lr; fifty of them each round in the last place of weights around one.
    assert ((weight - reference.detach()).abs() <= 50 * unit * reference.detach().abs().clamp_min(0.1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_split_master_is_exact_in_the_mean(dtype: torch.dtype) -> None:
    """Over all 256 values of the noise the 24-bit masters have x as their mean, to the noise's own resolution."""
    x = torch.cat([torch.randn(2000), torch.randn(2000) * 1e-3, torch.tensor([1.0, -1.0, 0.5, 65000.0])])
    noise = torch.arange(256, dtype=torch.int32).repeat_interleave(len(x))
    masters = codec.join_master(*codec.split_master(x.repeat(256), dtype, noise)).double().view(256, -1)
    step = masters.amax(0) - masters.amin(0)
    slack = 0.0 if dtype is torch.bfloat16 else 2.0**-37  # of an fp16 subnormal the last bits are gone
    resolution = step / 256 if dtype is torch.bfloat16 else step / 32
    assert torch.all((masters.mean(0) - x.double()).abs() <= resolution + slack)
    assert torch.all(masters.amin(0) <= x.double() + slack)
    assert torch.all(masters.amax(0) >= x.double() - slack)


def test_dithers_are_even_over_blocks_and_over_steps() -> None:
    over_blocks = codec.Noise(codec.tensor_key(0, 1, 2), 6400).dithers()
    steps = [codec.Noise(codec.tensor_key(0, step, 2), 1).dithers() for step in range(6400)]
    for kind in (0, 1):
        for found in (over_blocks[kind], torch.cat([pair[kind] for pair in steps])):
            counts = torch.bincount(found, minlength=64).double()
            assert len(counts) == 64
            assert ((counts - 100) ** 2 / 100).sum() < 63 + 6 * math.sqrt(2 * 63)


@pytest.mark.parametrize("form", [codec.STATE4, codec.STATE8], ids=["4", "8"])
def test_no_dither_leads_past_the_last_code(form: codec.StateCodec) -> None:
    """The largest value of a block, its scale rounded either way, with the largest noise and every dither."""
    largest = torch.rand(2000, generator=torch.Generator().manual_seed(0)).mul_(1e3).add_(1e-3)
    for sign in (1, -1):
        values = (sign * largest)[:, None].expand(-1, form.block).contiguous()
        n = values.numel()
        for k in range(64):
            dither = torch.full((len(values),), k, dtype=torch.int32)
            for noise in (0, 255):
                grains = torch.full(values.shape, noise, dtype=torch.int32)
                codes, _ = form.encode_m(values, grains, n, dither)
                assert set(form.decode_m(codes, n).unique().tolist()) == {sign * float(codec.LEVELS)}
                codes, _ = form.encode_root(values.abs(), grains, n, dither)
                assert set(form.unpack(codes, n).unique().tolist()) == {2**form.bits - 1}
