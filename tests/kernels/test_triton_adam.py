"""The Triton kernel equals its oracle. Without a GPU Triton's interpreter runs it, which tests all but the GPU's own
arithmetic; on a GPU (mark ``gpu``) the compiled kernel does.
"""

from __future__ import annotations

import copy

import pytest
import torch

from hf_lowmem import codec
from hf_lowmem.kernels import adam
from hf_lowmem.kernels.adam import AdamConstants, AdamTensor

pytest.importorskip("triton")
from hf_lowmem.kernels import triton_adam

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, of the interpreter
if ON_GPU:
    pytestmark.append(pytest.mark.gpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """The interpreter multiplies and adds with two roundings where the language, and a GPU, has one."""
    if ON_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self, x, y, z):
        a, b, c = (torch.from_numpy(t.data.copy()) for t in (x, y, z))
        return TensorHandle(codec.fma(a, b, c).numpy(), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)


def make(n: int, bits: int, weight: torch.dtype, grad: torch.dtype, extended: bool, start: int = 0) -> AdamTensor:
    generator = torch.Generator().manual_seed(n + bits)
    form = codec.STATES.get(bits)
    g = torch.randn(n, generator=generator) * torch.logspace(-6, 1, n) if n > 1 else torch.ones(n)

    def codes() -> torch.Tensor:
        if form is None:
            return torch.rand(n, generator=generator) * 1e-3
        return torch.randint(1, 255, (form.nbytes(n),), generator=generator, dtype=torch.uint8)

    def scales() -> torch.Tensor | None:
        return None if form is None else torch.rand(form.blocks(n), generator=generator) * 1e-2

    extension = torch.randint(-128, 128, (n,), generator=generator, dtype=torch.int8) if extended else None
    return AdamTensor(
        weight=(torch.randn(n, generator=generator) * 0.02).to(weight),
        grad=g.to(grad),
        m=codes(),
        v=codes(),
        m_scale=scales(),
        v_scale=scales(),
        bits=bits,
        constants=AdamConstants.of(bits, 3, 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.7),
        key=codec.tensor_key(1, 2, 3),
        extension=extension,
        start=start,
    )


def moved(t: AdamTensor, device: str) -> AdamTensor:
    out = copy.copy(t)
    for name in ("weight", "grad", "m", "v", "m_scale", "v_scale", "extension"):
        x = getattr(t, name)
        setattr(out, name, None if x is None else x.clone().to(device))
    return out


def assert_same_step(*tensors: AdamTensor, steps: int = 2) -> None:
    ours, oracles = [moved(t, DEVICE) for t in tensors], [moved(t, "cpu") for t in tensors]
    assert_same_steps(ours, oracles, steps)


def assert_same_steps(ours: list[AdamTensor], oracles: list[AdamTensor], steps: int) -> None:
    for _ in range(steps):
        skipped = triton_adam.adam_step(ours)
        assert int(skipped) == adam.adam_step(oracles)
    for i, (t, oracle) in enumerate(zip(ours, oracles, strict=True)):
        for name in ("weight", "m", "v", "m_scale", "v_scale", "extension"):
            one, other = getattr(t, name), getattr(oracle, name)
            if one is not None:
                kind = {4: torch.int32, 2: torch.int16, 1: one.dtype}[one.element_size()]
                assert torch.equal(one.cpu().view(kind), other.view(kind)), (i, name)


CASES = [
    (weight, extended) for weight in DTYPES for extended in ((False,) if weight is torch.float32 else (False, True))
]


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize(("weight", "extended"), CASES)
@pytest.mark.parametrize("grad", DTYPES)
def test_equals_the_oracle(bits, weight, extended, grad) -> None:
    assert_same_step(make(2 * 1024 + 300, bits, weight, grad, extended))


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025])
def test_any_size(bits, n) -> None:
    assert_same_step(make(n, bits, torch.bfloat16, torch.bfloat16, True))


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3e19])
def test_blocks_with_bad_gradients_are_left_alone(bits, bad) -> None:
    t = make(1024 + 300, bits, torch.bfloat16, torch.float32, True)
    t.grad[5] = t.grad[-1] = bad
    assert_same_step(t)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_extremes(bits) -> None:
    t = make(1024, bits, torch.bfloat16, torch.float32, True)
    t.grad[:300] = 0
    t.m[:40] = codec.STATES[bits].zero
    t.m_scale[0] = t.v_scale[0] = 0
    t.weight[::7] = 0
    t.weight[1::7] = -0.0
    t.grad[400], t.grad[500], t.grad[600] = 1e-45, 1e18, -1e-30
    assert_same_step(t, steps=4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_any_key_and_start(bits, key) -> None:
    t = make(700, bits, torch.bfloat16, torch.bfloat16, True, start=256 * 5)
    t.key = key
    assert_same_step(t)


def test_a_copy_is_refused() -> None:
    t = moved(make(256, 4, torch.float32, torch.float32, False), DEVICE)
    t.copy = t.weight.bfloat16()
    with pytest.raises(ValueError, match="has no 16-bit copy"):
        triton_adam.adam_step([t])


# -- many tensors -----------------------------------------------------------------------------------------------------
SIZES = [1, 255, 1023, 1024, 1025, 2048, 3000, 5000]


def many(bits: int, weight: torch.dtype, grad: torch.dtype, extended: bool, sizes: list[int]) -> list[AdamTensor]:
    made = [make(n, bits, weight, grad, extended, start=256 * (i % 3)) for i, n in enumerate(sizes)]
    for i, t in enumerate(made):
        t.key = codec.tensor_key(9, 1, i)
    return made


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize(("weight", "extended"), CASES)
def test_many_are_stepped_together(bits, weight, extended, monkeypatch) -> None:
    alone = []
    monkeypatch.setattr(triton_adam._Launch, "run", lambda self: alone.append(self))
    tensors = many(bits, weight, weight, extended, SIZES)
    tensors[3].grad[700] = tensors[-1].grad[-1] = float("inf")
    assert_same_step(*tensors)
    assert not alone


def test_of_many_kinds_at_once() -> None:
    """In any order, with constants of their own, and too few of a kind to be stepped together."""
    kinds = [(4, torch.bfloat16, torch.bfloat16, True), (4, torch.bfloat16, torch.float32, True)]
    kinds += [(8, torch.bfloat16, torch.bfloat16, True), (32, torch.float32, torch.float32, False)]
    tensors = [t for kind in kinds for t in many(*kind, SIZES[:5])]
    tensors += many(4, torch.float16, torch.float16, True, SIZES[:3])
    for t in tensors[::2]:
        t.constants = AdamConstants.of(t.bits, 4, 1e-2, 0.9, 0.95, 1e-6, 0.1, 1.0)
    order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(0)).tolist()
    assert_same_step(*(tensors[i] for i in order))


def test_what_is_not_aligned_goes_alone() -> None:
    sizes = [1024, 2000, 3000, 1500, 700, 900]
    ours = [moved(t, DEVICE) for t in many(4, torch.bfloat16, torch.bfloat16, True, sizes)]
    oracles = many(4, torch.bfloat16, torch.bfloat16, True, sizes)
    for t in ours[1:3]:  # a view of a larger buffer
        larger = torch.zeros(t.grad.numel() + 1, dtype=t.grad.dtype, device=t.grad.device)
        larger[1:] = t.grad
        t.grad = larger[1:]
    assert_same_steps(ours, oracles, 2)


def test_gradients_that_lie_elsewhere_and_other_sizes_the_next_time() -> None:
    """Nothing of an earlier step's table is used again."""
    ours = [moved(t, DEVICE) for t in many(4, torch.bfloat16, torch.bfloat16, True, SIZES)]
    oracles = many(4, torch.bfloat16, torch.bfloat16, True, SIZES)
    assert_same_steps(ours, oracles, 1)
    for t in ours:
        t.grad = t.grad.clone()
    assert_same_steps(ours[::-1], oracles[::-1], 1)
    assert_same_steps(ours[:5], oracles[:5], 1)
