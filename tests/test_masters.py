"""The masters of 16-bit weights: small updates arrive, and whoever writes the weight is heard."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizing import give_gradients, run, saved
from torch import nn

from hf_lowmem import codec
from hf_lowmem.optim import LowBitAdamW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master_bits", [24, 32])
def test_master_keeps_small_updates(dtype: torch.dtype, master_bits: int) -> None:
    p = nn.Parameter(torch.ones(4096, dtype=dtype))
    optimizer = LowBitAdamW([p], lr=3e-5, weight_decay=0.0, master_bits=master_bits)
    for _ in range(300):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (p.float() - (1 - 300 * 3e-5)).abs().max() < 2**-7


@pytest.mark.parametrize("state_bits", [4, 8, 32])
@pytest.mark.parametrize(("dtype", "master_bits"), [(torch.bfloat16, 16), (torch.bfloat16, 24), (torch.float16, 24)])
def test_smallest_updates_arrive_in_the_mean(dtype: torch.dtype, master_bits: int, state_bits: int) -> None:
    """Updates of 1e-6 on weights of 1, a fifteenth of a 24-bit master's last place: nearest would lose them all."""
    p = nn.Parameter(torch.ones(1 << 16, dtype=dtype))
    optimizer = LowBitAdamW([p], lr=1e-6, weight_decay=0.0, state_bits=state_bits, master_bits=master_bits)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    extension = optimizer.state[p].get("extension")
    weight = p.detach().float() if extension is None else codec.join_master(p.detach(), extension)
    moved = (1 - weight.double()).mean().item()
    # The mean of n values that each took 100 random steps of up to one last place.
    last_place = 2.0**-8 if master_bits == 16 else 2.0**-16 if dtype is torch.bfloat16 else 2.0**-19
    noise = last_place * (1e-4 / last_place) ** 0.5 / (1 << 8)
    assert abs(moved - 1e-4) < max(5 * noise, 2e-6)


def test_16_bits_move_in_the_mean() -> None:
    p = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    optimizer = LowBitAdamW([p], lr=1e-4, weight_decay=0.0, master_bits=16)
    for _ in range(50):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert abs(p.float().mean().item() - (1 - 50 * 1e-4)) < 5e-5


@pytest.mark.parametrize("master_bits", [24, 32])
@pytest.mark.parametrize("swap", [False, True])
def test_master_is_never_stale(master_bits: int, swap: bool) -> None:
    p = nn.Parameter(torch.randn(5000).bfloat16())
    optimizer = LowBitAdamW([p], lr=1e-3, master_bits=master_bits)
    run([p], optimizer, range(3))
    old, new = p.detach().clone(), torch.randn(5000).bfloat16()
    if swap:
        p.data = new.clone()
    else:
        with torch.no_grad():
            p.copy_(new)
    p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p, new)
    state = optimizer.state[p]
    master = state["master"] if master_bits == 32 else codec.join_master(p.detach(), state["extension"])
    changed = new != old
    assert torch.equal(master[changed], new.float()[changed])
    assert torch.equal(master.bfloat16(), new)


@pytest.mark.parametrize("master_bits", [16, 24, 32])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_behind_the_version_counter_counts(dtype: torch.dtype, turned: bool, master_bits: int) -> None:
    """`p.data.clamp_()` and its like leave no trace but the values."""
    p = nn.Parameter(torch.zeros(64, 100, dtype=dtype))
    if turned:
        p.data = p.data.t().contiguous().t()
    optimizer = LowBitAdamW([p], lr=1e-2, master_bits=master_bits, weight_decay=0.0)
    for _ in range(20):
        p.grad = -torch.ones_like(p)
        optimizer.step()
        assert p.max() < 0.04
        p.data.clamp_(-0.02, 0.02)


@pytest.mark.parametrize("master_bits", [16, 24, 32])
def test_a_weight_written_after_loading_counts(master_bits: int) -> None:
    p = nn.Parameter(torch.zeros(64, 100, dtype=torch.bfloat16))
    optimizer = LowBitAdamW([p], lr=1e-3, master_bits=master_bits)
    run([p], optimizer, range(2))
    p, optimizer = copy.deepcopy((p, optimizer))
    optimizer.load_state_dict(saved(optimizer))
    with torch.no_grad():
        p.fill_(5.0)
    run([p], optimizer, range(2, 3))
    assert (p - 5).abs().max() < 0.1


def test_another_layout_or_shape_at_the_same_address() -> None:
    weight = torch.randn(64, 64)
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    a, b = LowBitAdamW([ours], lr=0.1, state_bits=32), torch.optim.AdamW([theirs], lr=0.1)
    for step in range(4):
        if step == 2:
            ours.data, theirs.data = ours.data.t(), theirs.data.t()
            for optimizer, p in ((a, ours), (b, theirs)):  # the moments turn too
                state = optimizer.state[p]
                for key in ("m", "v") if optimizer is a else ():
                    state[key] = state[key].view(64, 64).t().contiguous().view(-1)
                for key in ("exp_avg", "exp_avg_sq") if optimizer is b else ():
                    state[key] = state[key].t()
        give_gradients([ours], step)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_moving_a_weight_keeps_its_master() -> None:
    p = nn.Parameter(torch.randn(5000).bfloat16())
    optimizer = LowBitAdamW([p], lr=1e-3)
    run([p], optimizer, range(3))
    twin, other = copy.deepcopy((p, optimizer))
    p.data = p.data.clone()
    run([p], optimizer, range(3, 5))
    run([twin], other, range(3, 5))
    assert torch.equal(p, twin)
    assert torch.equal(optimizer.state[p]["extension"], other.state[twin]["extension"])


def test_zeroed_weight_stays_zero() -> None:
    p = nn.Parameter(torch.full((4096,), 1.0, dtype=torch.bfloat16))
    optimizer = LowBitAdamW([p], lr=1e-3, weight_decay=0.0)
    run([p], optimizer, range(3))
    p.data.zero_()  # behind the version counter
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, torch.zeros_like(p))


@pytest.mark.parametrize("groups", [None, [[0, 1, 2]], [[0], [1], [2]], [[0]], [[2]], [[1, 2]]])
def test_pieces_of_one_tensor_keep_their_masters(groups) -> None:
    """They share torch's counter of writes: what is written to one must not look like a write of others to the rest."""

    def train(pieces: bool) -> list[torch.Tensor]:
        flat = torch.ones(3, 5000, dtype=torch.bfloat16)
        params = [nn.Parameter(piece if pieces else piece.clone()) for piece in flat]
        optimizer = LowBitAdamW(params, lr=1e-4, weight_decay=0.0)
        optimizer.defer([params[i] for i in group] for group in groups or [])
        for _ in range(30):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return [p.detach().clone() for p in params] + [optimizer.state[p]["extension"].clone() for p in params]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)
