"""The compiled core equals the definition in torch bit for bit, and touches nothing but its buffers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_lowmem import codec
from hf_lowmem.kernels import adam, native
from hf_lowmem.kernels.adam import AdamConstants, AdamTensor

needs_core = pytest.mark.skipif(not native.available(), reason="the compiled core is not built")
pytestmark = needs_core

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (weight, whether it has an extension, copy)
WEIGHTS = {
    "fp32": (F32, False, None),
    "fp32 and bf16": (F32, False, BF16),
    "fp32 and fp16": (F32, False, F16),
    "bf16 24 bits": (BF16, True, None),
    "bf16": (BF16, False, None),
    "fp16 24 bits": (F16, True, None),
    "fp16": (F16, False, None),
}
BUFFERS = ("weight", "grad", "m", "v", "m_scale", "v_scale", "extension", "copy")
ISAS = [name for name in native.isas() if name != native.TORCH]
SIZES = [1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 385, 511, 513, 1000]
GUARD = 96  # bytes on either side of a buffer, and their content
GUARD_BYTE = 0xA5


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_LOWMEM_ISA", request.param)
    return request.param


class Arena:
    """Buffers with guard bytes around them, at any offset from an alignment."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int, int]] = []

    def place(self, x: Tensor, misaligned: int) -> Tensor:
        size = x.numel() * x.element_size()
        # torch wants a view's storage offset in whole elements: the offset is one of elements, not of bytes.
        start = GUARD + misaligned * x.element_size()
        start -= start % x.element_size()
        raw = torch.full((start + size + GUARD,), GUARD_BYTE, dtype=torch.uint8)
        raw[start : start + size] = x.flatten().view(torch.uint8)
        self.buffers.append((raw, start, start + size))
        return raw[: start + size + (-(start + size)) % x.element_size()].narrow(0, start, size).view(x.dtype)

    def check(self) -> None:
        for raw, start, stop in self.buffers:
            assert (raw[:start] == GUARD_BYTE).all()
            assert (raw[stop:] == GUARD_BYTE).all()


def gradients(n: int, dtype: torch.dtype, generator: torch.Generator, kind: str) -> Tensor:
    grad = torch.randn(n, generator=generator) * 1e-2
    if kind == "wild":
        grad *= torch.exp2(torch.randint(-60, 30, (n,), generator=generator).float())
    if kind == "tiny":
        grad *= 1e-37 if dtype is not F16 else 1e-5
    if kind == "zero":
        grad *= 0
    if kind == "bad":
        at = torch.randint(0, n, (max(1, n // 300),), generator=generator)
        grad[at] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, 2e19])[at % 5]
        return grad.to(dtype)
    return grad.clamp(-6e4, 6e4).to(dtype) if dtype is F16 else grad.to(dtype)


def make(
    n: int, bits: int, weights: str, grad_dtype: torch.dtype, kind: str = "plain", seed: int = 0, **constants: float
) -> AdamTensor:
    """A tensor in the middle of training: codes of every value, scales of several sizes."""
    generator = torch.Generator().manual_seed(seed)
    dtype, extended, copy = WEIGHTS[weights]
    weight, extension = torch.randn(n, generator=generator), None
    if kind == "wild":
        weight *= torch.exp2(torch.randint(-30, 12, (n,), generator=generator).float())
        weight[:: max(1, n // 7)] = 0
    if extended:
        weight, extension = codec.split_master(weight, dtype)
        extension[::3] = torch.randint(-128, 128, (n,), generator=generator).to(torch.int8)[::3]
    form = codec.STATES.get(bits)
    if form is None:
        m, v = torch.randn(n, generator=generator) * 1e-2, torch.rand(n, generator=generator) * 1e-4
        m_scale = v_scale = None
    else:
        m, v = (torch.randint(0, 256, (form.nbytes(n),), generator=generator).to(torch.uint8) for _ in range(2))
        size = torch.randint(-12 if kind != "tiny" else -100, 1, (2, form.blocks(n)), generator=generator).float()
        m_scale, v_scale = (torch.rand(2, form.blocks(n), generator=generator) + 1.0) * torch.exp2(size)
    if kind == "zero":
        for x in (m, v) if form is None else (m_scale, v_scale):
            assert x is not None
            x.zero_()
    settings = {"step": 3, "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1} | constants
    return AdamTensor(
        weight=weight.to(dtype),
        grad=gradients(n, grad_dtype, generator, kind),
        m=m,
        v=v,
        m_scale=m_scale,
        v_scale=v_scale,
        bits=bits,
        constants=AdamConstants.of(bits, **settings),  # type: ignore[arg-type]
        key=codec.tensor_key(seed, 3, n),
        extension=extension,
        copy=None if copy is None else torch.zeros(n, dtype=copy),
    )


def placed(t: AdamTensor, arena: Arena | None = None, misaligned: int = 0) -> AdamTensor:
    """A copy of the tensor's buffers."""
    copies: dict[str, Tensor] = {}
    for i, name in enumerate(BUFFERS):
        x = getattr(t, name)
        if x is not None:
            copies[name] = x.clone() if arena is None else arena.place(x, misaligned * (i + 1) % 13)
    return replace(t, **copies)


def comparable(x: Tensor) -> Tensor:
    """The bits, with every NaN replaced by one and the same: payloads are no part of the contract."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.contiguous().view(torch.uint8)


def assert_equal(got: AdamTensor, expected: AdamTensor, what: object = "") -> None:
    for name in BUFFERS:
        a, b = getattr(got, name), getattr(expected, name)
        if a is None or torch.equal(comparable(a), comparable(b)):
            continue
        bad = (comparable(a) != comparable(b)).nonzero().flatten() // a.element_size()
        i = int(bad[0])
        raise AssertionError(
            f"{what} {name}: {len(bad.unique())} of {a.numel()} differ, the first one at {i}: {a[i]} against {b[i]}"
        )


def compare(tensors: list[AdamTensor], steps: int = 1, threads: int = 1, misaligned: int = 0, what: object = "") -> int:
    arena = Arena()
    ours = [placed(t, arena, misaligned) for t in tensors]
    reference = [placed(t) for t in tensors]
    skipped = 0
    for _ in range(steps):
        count = native.adam_step(ours, threads)
        assert count == adam.adam_step(reference), what
        skipped += count
        for a, b in zip(ours, reference, strict=True):
            assert_equal(a, b, what)
    arena.check()
    return skipped


# -- equality -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("grad", [F32, BF16, F16], ids=["g fp32", "g bf16", "g fp16"])
def test_equals_torch(isa: str, bits: int, weights: str, grad: torch.dtype) -> None:
    compare([make(n, bits, weights, grad, seed=n) for n in (1, 129, 700)], steps=2, misaligned=1)


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize(("weights", "grad"), [("fp32", F32), ("bf16 24 bits", BF16), ("bf16", BF16), ("fp16", F32)])
def test_sizes_and_offsets(isa: str, bits: int, weights: str, grad: torch.dtype) -> None:
    for i, n in enumerate(SIZES):
        compare([make(n, bits, weights, grad, seed=n)], misaligned=i, what=n)


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("kind", ["wild", "tiny", "zero", "bad"])
@pytest.mark.parametrize("grad", [F32, BF16, F16], ids=["g fp32", "g bf16", "g fp16"])
def test_numbers_of_every_size(isa: str, bits: int, kind: str, grad: torch.dtype) -> None:
    for weights in ("fp32 and fp16", "bf16 24 bits", "bf16", "fp32"):
        for n in (300, 2048):
            skipped = compare(
                [make(n, bits, weights, grad, kind, seed=n)], steps=2, misaligned=n % 7, what=(weights, n)
            )
            assert (skipped > 0) == (kind == "bad")


def test_copies_of_fp16_subnormals_are_rounded_once(isa: str) -> None:
    t = make(1 << 16, 4, "fp32 and fp16", F32, lr=0.0, weight_decay=0.0)
    bits = torch.randint(0x33000000, 0x38800000, (len(t.weight),), generator=torch.Generator().manual_seed(0))
    compare([replace(t, weight=bits.to(torch.int32).view(F32))])


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("constants", [
    {"beta1": 0.0}, {"beta2": 0.0}, {"beta1": 1e-12, "beta2": 1e-30}, {"eps": 0.0}, {"eps": 1e-40}, {"lr": 0.0},
    {"step": 1}, {"step": 100_000}, {"grad_scale": 1e-6}, {"grad_scale": 0.0}, {"grad_scale": 1e15},
    {"grad_scale": -2.0},
], ids=str)  # fmt: skip
def test_hyperparameters(isa: str, bits: int, constants: dict[str, float]) -> None:
    for weights, grad, kind in (("bf16 24 bits", BF16, "plain"), ("fp32", F32, "tiny")):
        compare([make(600, bits, weights, grad, kind, **constants)], steps=2)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_weights_that_are_not_finite(isa: str, bits: int) -> None:
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.3e38, -3.3e38, 0.0, -0.0, 1e-40])
    for weights in ("fp32", "fp32 and bf16", "fp32 and fp16", "bf16 24 bits", "bf16"):
        t = make(512, bits, weights, BF16)
        t.weight[:64] = special.repeat(8).to(t.weight.dtype)
        compare([t], what=weights)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_and_every_word(isa: str, bits: int) -> None:
    """All pairs of codes of a byte, all finite bf16 weights, and among them all bf16 gradients that are allowed."""
    words = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    t = make(len(words), bits, "bf16 24 bits", BF16, weight_decay=0.0)
    t = replace(t, weight=torch.where(words.isfinite(), words, torch.zeros_like(words)))
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(5))
    t.grad.copy_(torch.where(words.float().abs() < 1e18, words, torch.ones_like(words))[order])
    t.m.copy_(torch.arange(len(t.m)) % 256)
    t.v.copy_(torch.arange(len(t.v)) // 256 % 256)
    assert compare([t]) == 0


def test_fifty_steps_in_a_row(isa: str) -> None:
    for bits in (4, 8, 32):
        t = make(900, bits, "bf16 24 bits", BF16, "zero")
        a, b = placed(t), placed(t)
        for step in range(1, 51):
            grad = gradients(900, BF16, torch.Generator().manual_seed(step), "plain")
            constants = AdamConstants.of(bits, step, 1e-3, 0.9, 0.999, 1e-8, 0.01)
            a, b = (replace(x, grad=grad, constants=constants, key=codec.tensor_key(0, step, 0)) for x in (a, b))
            native.adam_step([a], 1)
            adam.adam_step([b])
            assert_equal(a, b, (bits, step))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    bits=st.sampled_from([4, 8, 32]),
    weights=st.sampled_from(list(WEIGHTS)),
    grad=st.sampled_from([F32, BF16, F16]),
    kind=st.sampled_from(["plain", "wild", "tiny", "zero", "bad"]),
    misaligned=st.integers(0, 12),
    start=st.integers(0, 1 << 24),
    isa=st.sampled_from(ISAS),
)
def test_anything(
    sizes: list[int],
    bits: int,
    weights: str,
    grad: torch.dtype,
    kind: str,
    misaligned: int,
    start: int,
    isa: str,
) -> None:
    if WEIGHTS[weights][0] is F16 and kind == "wild":
        kind = "plain"  # weights that fp16 cannot hold are no part of this test
    tensors = [make(n, bits, weights, grad, kind if n else "plain", seed=n) for n in sizes]
    tensors = [replace(t, start=start * 256) for t in tensors]
    before = os.environ.get("HF_LOWMEM_ISA")
    os.environ["HF_LOWMEM_ISA"] = isa
    try:
        compare(tensors, misaligned=misaligned)
    finally:
        os.environ.pop("HF_LOWMEM_ISA") if before is None else os.environ.update(HF_LOWMEM_ISA=before)


# -- parts and threads ----------------------------------------------------------------------------------------------
@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SMALLEST_PIECE", 256)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads(threads: int) -> None:
    kinds = itertools.product((4, 8, 32), WEIGHTS, (F32, BF16))
    tensors = [make(100 + 217 * i, *kind, "bad", seed=i) for i, kind in enumerate(kinds)]
    assert compare(tensors, threads=threads, misaligned=3) > 0


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_parts_equal_the_whole(isa: str, bits: int) -> None:
    for weights in WEIGHTS:
        t = make(2000, bits, weights, BF16)
        whole, parts = placed(t), placed(t)
        native.adam_step([whole], 1)
        cuts = (0, 512, 768, 2000)
        for start, stop in itertools.pairwise(cuts):
            native.adam_step([replace(parts, grad=parts.grad[start:stop]).part(start, stop)], 1)
        assert_equal(parts, whole, weights)


def test_the_calling_threads_rounding_does_not_matter(isa: str) -> None:
    t = make(500, 32, "fp32", F32, "tiny")
    a, b = placed(t), placed(t)
    adam.adam_step([b])
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        native.adam_step([a], 1)
        flushed = torch.tensor([1e-40]) * 1.0
    finally:
        torch.set_flush_denormal(False)
    assert_equal(a, b)
    assert flushed.item() == 0.0  # and the thread's own setting is back


# -- the door -------------------------------------------------------------------------------------------------------
def test_nothing_to_do() -> None:
    assert native.adam_step([]) == 0
    assert native.adam_step([make(0, 4, "fp32", F32)]) == 0


def test_isas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.isas()[-2:] == ("base", "torch")
    monkeypatch.delenv("HF_LOWMEM_ISA", raising=False)
    assert native.isa() == native.isas()[0]
    monkeypatch.setenv("HF_LOWMEM_ISA", "BASE")
    assert native.isa() == "base"
    monkeypatch.setenv("HF_LOWMEM_ISA", "sse9")
    with pytest.raises(ValueError, match=r"HF_LOWMEM_ISA='sse9': this machine and build have .*base, torch"):
        native.isa()
    with pytest.raises(ValueError, match="sse9"):
        native.adam_step([make(1, 4, "fp32", F32)])


def test_the_torch_engine_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LOWMEM_ISA", "torch")
    compare([make(300, 4, "fp32", F32)])


@pytest.mark.parametrize(("name", "value", "message"), [
    ("grad", torch.zeros(299), "grad has 299 values"),
    ("m", torch.zeros(10, dtype=torch.uint8), r"m has 10 values .* 192 torch.uint8"),
    ("v", torch.zeros(192), "v has 192 values of torch.float32"),
    ("m_scale", None, "m_scale is missing; a contiguous CPU tensor of 3 torch.float32"),
    ("v_scale", torch.zeros(6)[::2], r"strides are \(2,\)"),
    ("extension", torch.zeros(300, dtype=torch.uint8), "extension has 300 values of torch.uint8"),
    ("extension", torch.zeros(301, dtype=torch.int8), "extension has 301 values"),
    ("copy", torch.zeros(300), "copy is torch.float32 of a torch.bfloat16 weight"),
    ("weight", torch.zeros(300, dtype=torch.float64), "weight is torch.float64"),
    ("weight", torch.zeros(300), "extension belongs to"),
    ("grad", torch.zeros(300, dtype=torch.int32), "grad is torch.int32"),
    ("grad", torch.zeros(300, device="meta"), "on meta"),
    ("bits", 5, "bits=5"),
    ("start", 128, "start=128"),
], ids=str)  # fmt: skip
def test_wrong_buffers_are_named_before_anything_is_written(name: str, value: object, message: str) -> None:
    good = make(1000, 4, "bf16 24 bits", BF16)
    before = placed(good)
    bad = make(300, 4, "bf16 24 bits", BF16)
    with pytest.raises(ValueError, match="tensor 1: .*" + message):
        native.adam_step([good, replace(bad, **{name: value})])  # type: ignore[arg-type]
    assert_equal(good, before)


def test_threads_have_to_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="threads=0"):
        native.adam_step([], threads=0)


def test_threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert 1 <= native.physical_cores() <= (os.cpu_count() or 1)
    assert native.default_threads() == max(1, native.physical_cores() - 1)
    monkeypatch.setattr(native, "physical_cores", lambda: 8)
    assert native.default_threads() == 7


def test_without_the_core_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_LOWMEM_ISA", raising=False)
    monkeypatch.setattr(native, "_library", lambda: None)
    native.isas.cache_clear()
    native._warn_once.cache_clear()
    t = make(300, 4, "fp32", F32)
    expected = placed(t)
    adam.adam_step([expected])
    try:
        assert not native.available()
        assert native.isas() == ("torch",)
        with pytest.warns(RuntimeWarning, match="no compiled core"):
            native.adam_step([t])
        assert_equal(t, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            native.adam_step([t])
    finally:
        native.isas.cache_clear()


def test_triad() -> None:
    a, b, c = torch.zeros(1003), torch.randn(1003), torch.randn(1003)
    for name in ISAS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_LOWMEM_ISA", name)
            native.triad(a.zero_()[1:], b[1:], c[1:], 0.5, threads=3)
        torch.testing.assert_close(a[1:], b[1:] + 0.5 * c[1:])
        assert a[0] == 0
    with pytest.raises(ValueError, match="b has 5 values"):
        native.triad(a, b[:5], c, 1.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_its_own_threads() -> None:
    code = """
import os, sys, torch
from hf_lowmem.kernels import native
from hf_lowmem.kernels.adam import AdamConstants, AdamTensor
native.SMALLEST_PIECE = 256
def step():
    n, k = 4096, AdamConstants.of(32, 1, 1e-3, 0.9, 0.99, 1e-8, 0.0)
    t = AdamTensor(torch.ones(n), torch.ones(n), torch.zeros(n), torch.zeros(n), None, None, 32, k)
    native.adam_step([t], threads=3)
    return t.weight
first = step()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(step(), first) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


# -- all_finite -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1000, (1 << 22) + 300])
def test_all_finite(isa: str, dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n + 1).to(dtype)[1:]  # no alignment but the elements' own
    if n:
        x[0], x[-1] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert native.all_finite([x, x[:0]], threads=2)
    for at in {0, n // 2, n - 1} if n else ():
        for bad in (float("nan"), float("inf"), float("-inf")):
            kept = x[at].clone()
            x[at] = bad
            assert not native.all_finite([x[:0], x], threads=2)
            x[at] = kept


def test_all_finite_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 is torch\.float64"):
        native.all_finite([torch.zeros(3), torch.zeros(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match="contiguous"):
        native.all_finite([torch.zeros(6)[::2]])
