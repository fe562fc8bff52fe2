"""Steps of weights that exist in 8 bits alone: the one pass of the core equals decoding, stepping and recoding."""

from __future__ import annotations

import pytest
import torch

from hf_lowmem import code_updates
from hf_lowmem.code_updates import CodeUpdates
from hf_lowmem.kernels import native, native_weights
from hf_lowmem.kernels.weights import FINDS_CODES, FORMS, INT8, empty, encode
from hf_lowmem.resident import ResidentUpdates
from hf_lowmem.state import new_state

GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(40, 96), (7, 256), (300, 64), (1, 5000), (2500, 100), (0, 64)]


def steps(shape, bits: int, dtype: torch.dtype, threads: int) -> list[torch.Tensor | int]:
    """What three steps leave behind; one of the gradients is none."""
    generator = torch.Generator().manual_seed(1)
    updates, p = CodeUpdates(), torch.empty(shape)
    updates.codes[p] = codes, scale = empty(shape, INT8)
    if p.numel():
        encode(torch.randn(shape, generator=generator) * 0.02, INT8, codes, scale)
    state, skipped = new_state(p.numel(), bits, 3), []
    for number in range(1, 4):
        grad = torch.randn(p.numel(), generator=generator).to(dtype)
        grad[100:101] = float("nan")
        skipped.append(updates.step(p, GROUP, state, grad, (7, 0.5, number), threads, ResidentUpdates()))
    return [codes, scale, *(x for x in state.values() if isinstance(x, torch.Tensor)), torch.tensor(skipped)]


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_pass_is_three(monkeypatch, shape, bits) -> None:
    dtype = torch.float32 if bits == 8 else torch.bfloat16
    monkeypatch.setenv("HF_LOWMEM_ISA", native.TORCH)
    wanted = steps(shape, bits, dtype, 1)
    monkeypatch.setattr(code_updates, "PIECE", 1000)
    for one, other in zip(wanted, steps(shape, bits, dtype, 1), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(native_weights, "STEPPED", 2000)
    for isa in native.isas()[:-1]:
        monkeypatch.setenv("HF_LOWMEM_ISA", isa)
        for threads in (1, 3):
            for one, other in zip(wanted, steps(shape, bits, dtype, threads), strict=True):
                assert torch.equal(one, other)


def test_refused(monkeypatch) -> None:
    if not native.available():
        pytest.skip("needs the compiled core")
    codes, scale = empty((8, 64), INT8)
    state = new_state(512, 4, 0)
    tensor = code_updates.state_tensor(state, GROUP, 0, codes.view(-1), torch.zeros(512), 1.0, 1)
    with pytest.raises(ValueError, match="scale has 7 values"):
        native_weights.step(tensor, codes, scale[:7], 1)
    with pytest.raises(ValueError, match=r"codes has 512 values of torch\.int8.*strides"):
        native_weights.step(tensor, codes.t().contiguous().t(), scale, 1)
    monkeypatch.setenv("HF_LOWMEM_ISA", native.TORCH)
    with pytest.raises(RuntimeError, match="needs the compiled core"):
        native_weights.step(tensor, codes, scale, 1)


def test_4_bits_alone_are_not_trained() -> None:
    form = FORMS["int4"]
    p = torch.nn.Parameter(torch.full((), float("nan")).expand(64, 64))
    setattr(p, FINDS_CODES, lambda q: empty((64, 64), form))
    with pytest.raises(ValueError, match="weight exists in 4 bits alone, which cannot be trained"):
        CodeUpdates().look([(p, {}, "weight")])
    p.requires_grad_(False)
    CodeUpdates().look([(p, {}, "weight")])
