"""The path of parameters on a GPU, without one: tensors that say they are there, and streams that work at once.

What the optimizer does for such parameters (homes, pieces, masters, changed weights, skipped steps) must give the bits
of the path for the CPU. tests/test_staging.py holds the same on a real GPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
from at_once import AtOnce
from torch import Tensor, nn

from hf_lowmem import home, memory, staging
from hf_lowmem import host as host_updates
from hf_lowmem.optim import LowBitAdamW

GPU = torch.device("cuda:0")
SHAPES = [(60, 70), (9000,), (5,), (), (64, 64)]
RECIPES = [(4, 24), (4, 16), (4, 32), (8, 24), (32, 24)]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with `on_gpu` set say that they are on a GPU, and so do the sums of their bits."""
    real = torch.Tensor.device
    place = property(lambda self: GPU if getattr(self, "on_gpu", False) else real.__get__(self))
    monkeypatch.setattr(torch.Tensor, "device", place, raising=False)
    for name in ("Stream", "Event", "stream", "current_stream", "device"):
        monkeypatch.setattr(torch.cuda, name, AtOnce)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(memory, "_register", lambda base, start, nbytes: False)
    monkeypatch.setattr(staging, "PIECE", 2048)
    real_sum = staging.sum_of_bits
    for module in (host_updates, home):
        monkeypatch.setattr(module, "sum_of_bits", lambda x: on_gpu(real_sum(x)))


def on_gpu(x: Tensor) -> Tensor:
    x.on_gpu = True  # type: ignore[attr-defined]
    return x


def pair(dtype: torch.dtype) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    gen = torch.Generator().manual_seed(0)
    host = [nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for shape in SHAPES]
    device = [on_gpu(nn.Parameter(p.detach().clone())) for p in host]
    device[4].data = device[4].data.t().contiguous().t()  # not contiguous
    return host, device  # type: ignore[return-value]


def give_gradients(host: list[nn.Parameter], device: list[nn.Parameter], seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    for p, q in zip(host, device, strict=True):
        p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)
        q.grad = on_gpu(p.grad.clone())


def assert_same(host: list[nn.Parameter], a: LowBitAdamW, device: list[nn.Parameter], b: LowBitAdamW) -> None:
    for p, q in zip(host, device, strict=True):
        assert torch.equal(p, q), tuple(p.shape)
        for key, value in a.state[p].items():
            assert torch.equal(value, b.state[q][key]) if isinstance(value, Tensor) else value == b.state[q][key]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("state_bits", "master_bits"), RECIPES)
@pytest.mark.parametrize("staging_bytes", [1, 10**8])
def test_same_bits(dtype: torch.dtype, state_bits: int, master_bits: int, staging_bytes: int) -> None:
    host, device = pair(dtype)
    options = {"lr": 1e-2, "state_bits": state_bits, "master_bits": master_bits, "staging_bytes": staging_bytes}
    a, b = LowBitAdamW(host, **options), LowBitAdamW(device, **options)
    for step in range(5):
        give_gradients(host, device, step)
        a.scale_gradients(0.5)
        b.scale_gradients(0.5)
        a.step()
        b.step()
        assert_same(host, a, device, b)
    assert b._host.stagings._known


@pytest.mark.parametrize("master_bits", [16, 24, 32])
@pytest.mark.parametrize("how", ["copy_", "data.clamp_", "data ="])
def test_a_weight_that_somebody_else_writes(master_bits: int, how: str) -> None:
    host, device = pair(torch.bfloat16)
    options = {"lr": 1e-2, "master_bits": master_bits}
    a, b = LowBitAdamW(host, **options), LowBitAdamW(device, **options)
    for step in range(4):
        give_gradients(host, device, step)
        a.step()
        b.step()
        for params in (host, device):
            for p in params:
                if how == "copy_":
                    with torch.no_grad():
                        p.copy_(torch.full_like(p, 0.5))
                elif how == "data.clamp_":
                    p.data.clamp_(-0.3, 0.3)
                else:
                    p.data = torch.full_like(p.data, 0.25)
    give_gradients(host, device, 9)
    a.step()
    b.step()
    limit = {"copy_": 0.5, "data.clamp_": 0.3, "data =": 0.25}[how]
    for p, q in zip(host, device, strict=True):
        assert q.abs().max() < limit + 0.05
        assert torch.allclose(p, q, rtol=0.01, atol=1e-3)  # masters differ: on the CPU less can be told apart


def test_checked_and_skipped_steps() -> None:
    host, device = pair(torch.bfloat16)
    a, b = (LowBitAdamW(params, check_finite=True) for params in (host, device))
    for step in range(4):
        give_gradients(host, device, step)
        if step == 2:
            host[1].grad[7] = device[1].grad[7] = float("inf")
        a.step()
        b.step()
    assert a.skipped_steps == b.skipped_steps == 1
    assert_same(host, a, device, b)


def test_saved_loaded_and_copied() -> None:
    host, device = pair(torch.bfloat16)
    a, b = LowBitAdamW(host), LowBitAdamW(device)
    for step in range(6):
        give_gradients(host, device, step)
        a.step()
        b.step()
        if step == 2:
            b.load_state_dict(copy.deepcopy(b.state_dict()))
    assert_same(host, a, device, b)


def test_late_parameters_and_missing_gradients() -> None:
    host, device = pair(torch.bfloat16)
    a, b = LowBitAdamW(host[:3]), LowBitAdamW(device[:3])
    for step in range(6):
        give_gradients(host, device, step)
        if step == 3:
            for optimizer, params in ((a, host), (b, device)):
                optimizer.add_param_group({"params": params[3:], "lr": 0.1})
        if step % 2:
            host[1].grad = device[1].grad = None
        a.step()
        b.step()
    assert_same(host, a, device, b)


def test_a_failed_step_leaves_the_optimizer_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = pair(torch.bfloat16)
    b = LowBitAdamW(device, lr=0.1)
    give_gradients(host, device, 0)
    b.step()
    with monkeypatch.context() as broken:
        broken.setattr(host_updates.native, "adam_step", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            b.step()
    before = [q.detach().clone() for q in device]
    b.step()
    assert all(not torch.equal(q, old) for q, old in zip(device, before, strict=True))
    assert [b.state[q]["step"] for q in device] == [2] * len(device)
