"""The compiled core writes and reads weights bit for bit as ``kernels.weights`` does, and touches nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_lowmem import codec
from hf_lowmem.kernels import native, native_weights, weights
from hf_lowmem.kernels.weights import FORMS, INT4, INT8, WeightForm, empty

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GUARD = 7  # values before and behind a buffer, which also take it off every alignment but its type's


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch's: of two, one waits for a core that the other tests have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_LOWMEM_ISA", request.param)
    return request.param


def guarded(x: Tensor) -> Tensor:
    """A copy of it with a guard on either side."""
    whole = torch.zeros(x.numel() + 2 * GUARD, dtype=x.dtype)
    whole.view(torch.uint8).fill_(0xA5)
    return whole[GUARD:-GUARD].view(x.shape).copy_(x)


def assert_guards(*buffers: Tensor) -> None:
    for x in buffers:
        whole = x.view(-1).as_strided((x.numel() + 2 * GUARD,), (1,), x.storage_offset() - GUARD)
        for side in (whole[:GUARD], whole[-GUARD:]):
            assert (side.contiguous().view(torch.uint8) == 0xA5).all()


def same(ours: Tensor, oracle: Tensor) -> bool:
    """Bit for bit, but for what a NaN carries."""
    known = ~oracle.isnan()
    words = {4: torch.int32, 2: torch.int16, 1: torch.int8}[oracle.element_size()]
    return torch.equal(ours.isnan(), ~known) and torch.equal(ours.view(words)[known], oracle.view(words)[known])


def weight(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Rows of every size; the first of them hold what is special, if there are as many."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).view(-1, shape[-1])
    x *= torch.logspace(-6, 3, len(x))[:, None]
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 2.0**-100, 2.0**-97, 3.4e38, 6e4]
    if len(x) > 2 * len(special):
        for row, value in enumerate(special):
            x[row, row % shape[-1]] = value
            x[row + len(special)] = value
    return x.view(shape).to(dtype)


def assert_encoded(xs: list[Tensor], forms: list[WeightForm], threads: int | None) -> None:
    """And that reading the codes gives what it should, in every dtype."""
    xs = [guarded(x) for x in xs]
    ours, oracle = ([], [])
    for x, form in zip(xs, forms, strict=True):
        ours.append(tuple(map(guarded, empty(tuple(x.shape), form))))
        oracle.append(empty(tuple(x.shape), form))
    native_weights.encode([(x, f, *parts) for x, f, parts in zip(xs, forms, ours, strict=True)], threads)
    reads = []
    for x, form, mine, (codes, scale) in zip(xs, forms, ours, oracle, strict=True):
        weights.encode(x, form, codes, scale)
        assert torch.equal(mine[0], codes), (form.name, x.dtype, x.shape)
        assert same(mine[1], scale), (form.name, x.dtype, x.shape)
        assert_guards(x, *mine)
        for dtype in DTYPES:
            found, expected = guarded(torch.empty(x.shape, dtype=dtype)), torch.empty(x.shape, dtype=dtype)
            weights.decode(codes, scale, form, expected)
            reads.append(((*mine, form, found), expected))
    native_weights.decode([item for item, _ in reads], threads)
    for (*_, found), expected in reads:
        assert same(found, expected)
        assert_guards(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(isa: str, dtype: torch.dtype) -> None:
    shapes = [(1, 1), (1, 7), (3, 31), (2, 33), (40, 65), (30, 64), (3, 5, 96), (1, 32), (1, 640), (70, 257)]
    for shape in shapes:
        for form in FORMS.values():
            if form.takes(shape):
                assert_encoded([weight(shape, dtype)], [form], 1)


@pytest.mark.parametrize("threads", [1, 2, 4, None])
def test_several_at_once(isa: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_weights, "SMALLEST_PIECE", 1)
    shapes = [(50, 1024), (1, 32), (2, 5000, 4), (4, 20000), (2, 30000), (513, 96), (64, 64)]
    xs = [weight(shape, dtype) for shape, dtype in zip(shapes, itertools.cycle(DTYPES), strict=False)]
    forms = [INT4 if i % 2 and INT4.takes(tuple(x.shape)) else INT8 for i, x in enumerate(xs)]
    assert {form.name for form in forms} == FORMS.keys()
    assert_encoded(xs, forms, threads)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_value_of_16_bits(isa: str, dtype: torch.dtype) -> None:
    """Alone in its row, beside one that is larger, and in the place of every value."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    assert_encoded([x.view(-1, 64), torch.stack((x, x.flip(0)), 1).repeat(1, 16)], [INT4, INT4], 2)
    assert_encoded([x.view(-1, 64), torch.stack((x, torch.full_like(x, 2.5)), 1)], [INT8, INT8], 2)


def test_ties(isa: str) -> None:
    half = torch.tensor([[-8.0, *[i + 0.5 for i in range(-8, 8)], *range(-8, 7)]])
    assert_encoded([half, -half, half.clamp(max=7.5)], [INT4] * 3, 1)
    # of two that are as large the negative one becomes -8
    assert_encoded([torch.tensor([[3.0, -3.0] * 16, [-3.0, 3.0] * 16])], [INT4], 1)
    row = torch.tensor([126.99, *[i + 0.5 for i in range(-126, 126)]])[None]
    assert_encoded([row], [INT8], 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_recoding(isa: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_weights, "SMALLEST_PIECE", 1)
    items, oracles = [], []
    for i, shape in enumerate([(1, 1), (40, 65), (50, 1000), (3, 20000)]):
        x = weight(shape, torch.float32).clamp(-1e30, 1e30).nan_to_num(0)  # first what has scales
        codes, scale = map(guarded, empty(shape, INT8))
        weights.encode(x, INT8, codes, scale)
        after = weight(shape, torch.float32, seed=1) * (1 + 1e-3 * torch.randn(shape))
        after[0, 0] *= 1.5  # out of its scale's reach, or a NaN
        key = (0, 2**64 - 1, codec.tensor_key(1, 2, 3), 5)[i]
        oracles.append((after, codes.clone(), scale.clone(), key))
        items.append((guarded(after), codes, scale, key))
    native_weights.recode(items, threads)
    for mine, oracle in zip(items, oracles, strict=True):
        weights.recode(*oracle)
        assert torch.equal(mine[1], oracle[1])
        assert same(mine[2], oracle[2])
        assert_guards(*mine[:3])


def test_what_has_not_changed_is_written_as_it_was(isa: str) -> None:
    codes, scale = empty((64, 1000), INT8)
    native_weights.encode([(weight((64, 1000), torch.float32)[21:].repeat(2, 1)[:64], INT8, codes, scale)])
    before, x = (codes.clone(), scale.clone()), torch.empty(64, 1000)
    for step in range(5):
        native_weights.decode([(codes, scale, INT8, x)])
        native_weights.recode([(x, codes, scale, codec.tensor_key(1, step, 2))])
    assert torch.equal(codes, before[0])
    assert torch.equal(scale, before[1])


@pytest.mark.parametrize(("form", "x", "codes", "scale", "message"), [
    (INT8, torch.zeros(4, 64, dtype=torch.float64), None, None, "x is torch.float64"),
    (INT8, torch.zeros(64), None, None, r"x of shape \(64,\) cannot be written as int8"),
    (INT8, torch.zeros(0, 64), None, None, r"x of shape \(0, 64\) cannot"),
    (INT4, torch.zeros(4, 33), None, None, r"x of shape \(4, 33\) cannot be written as int4"),
    (INT8, torch.zeros(64, 4).t(), None, None, r"strides are \(1, 4\)"),
    (INT8, torch.zeros(4, 64, device="meta"), None, None, "x has .* on meta"),
    (INT8, None, torch.zeros(4, 64, dtype=torch.uint8), None, "codes has 256 values of torch.uint8"),
    (INT4, None, torch.zeros(4, 32, dtype=torch.int8), None, "codes has 128 values of torch.int8"),
    (INT4, None, torch.zeros(4, 64, dtype=torch.uint8), None, r"codes has shape \(4, 64\); .* needs \(4, 32\) in int4"),
    (INT8, None, torch.zeros(64, 4, dtype=torch.int8).t(), None, r"strides are \(1, 4\)"),
    (INT8, None, None, torch.zeros(4), r"scale has shape \(4,\)"),
    (INT8, None, None, torch.zeros(4, 1, dtype=torch.float64), "scale has 4 values of torch.float64"),
    (INT4, None, None, torch.zeros(4, 2), "scale has 8 values of torch.float32"),
], ids=str)  # fmt: skip
def test_wrong_buffers_are_named_before_anything_is_written(form, x, codes, scale, message: str) -> None:
    good = (torch.randn(4, 64), INT8, *empty((4, 64), INT8))
    before = [part.fill_(3).clone() for part in good[2:]]
    x = torch.zeros(4, 64) if x is None else x
    room = empty((4, 64), form)
    bad = (x, form, room[0] if codes is None else codes, room[1] if scale is None else scale)
    with pytest.raises(ValueError, match="1: .*" + message):
        native_weights.encode([good, bad])
    assert all(torch.equal(*pair) for pair in zip(good[2:], before, strict=True))
    if not x.dtype.is_floating_point or x.is_meta:
        return
    with pytest.raises(ValueError, match="1: .*" + message.replace("x ", "out ")):
        native_weights.decode([(*good[2:], INT8, good[0]), (*bad[2:], form, bad[0])])


def test_only_matrices_of_floats_are_recoded() -> None:
    for x in (torch.zeros(2, 3, 4), torch.zeros(6, 4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"weight 0: x is .* needed"):
            native_weights.recode([(x, *empty((6, 4), INT8), 0)])


def test_none_at_all_and_no_threads() -> None:
    native_weights.encode([])
    native_weights.decode([])
    native_weights.recode([])
    with pytest.raises(ValueError, match="threads=0"):
        native_weights.encode([], threads=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_callers_float_environment_counts_for_nothing(isa: str, dtype: torch.dtype) -> None:
    """fp16's small numbers go through fp32's subnormals."""
    x = torch.arange(1, 1 + 2048).to(torch.int16).view(torch.float16).view(-1, 64).to(dtype)
    for form in FORMS.values():
        ours, oracle = empty((32, 64), form), empty((32, 64), form)
        weights.encode(x, form, *oracle)
        expected = torch.empty(32, 64, dtype=torch.float16)
        weights.decode(*oracle, form, expected)
        found = torch.empty_like(expected)
        if isa == native.TORCH or not torch.set_flush_denormal(True):
            pytest.skip("nothing is flushed here")
        try:
            native_weights.encode([(x, form, *ours)], threads=1)
            native_weights.decode([(*ours, form, found)], threads=1)
        finally:
            torch.set_flush_denormal(False)
        assert all(torch.equal(*pair) for pair in zip((*ours, found), (*oracle, expected), strict=True))
