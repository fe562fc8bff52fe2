"""What a state dict of LowBitAdamW holds, what may be loaded into which widths, and what is refused."""

from __future__ import annotations

import pytest
import torch
from optimizing import parameters, run, same, saved
from torch import Tensor, nn

from hf_lowmem import codec
from hf_lowmem import state as states
from hf_lowmem.optim import LowBitAdamW


@pytest.mark.parametrize(("state_bits", "bytes_a_value"), [(4, 1.0625), (8, 2.03125), (32, 8.0)])
def test_bytes(state_bits: int, bytes_a_value: float) -> None:
    p = nn.Parameter(torch.randn(256, 1024).bfloat16())
    optimizer = LowBitAdamW([p], state_bits=state_bits)
    run([p], optimizer, range(1))
    n = p.numel()
    assert optimizer.nbytes() == {"parameters": n, "states": int(bytes_a_value * n), "master": n}
    tensors = [x for x in optimizer.state_dict()["state"][0].values() if isinstance(x, Tensor)]
    assert sum(x.nbytes for x in tensors) == int((bytes_a_value + 1) * n)
    assert all(x.device.type == "cpu" and x.is_contiguous() for x in tensors)


def test_only_small_parameters_keep_fp32() -> None:
    sizes = [4095, 4096, 4097, 128 * 33 + 1, 100_003]
    params = [nn.Parameter(torch.randn(n)) for n in sizes]
    optimizer = LowBitAdamW(params)
    run(params, optimizer, range(1))
    assert [optimizer.state[p]["bits"] for p in params] == [32, 4, 4, 4, 4]


def test_loaded_memory_is_not_shared() -> None:
    params, twins = parameters(), parameters()
    a, b = LowBitAdamW(params), LowBitAdamW(twins)
    run(params, a, range(2))
    run(twins, b, range(2))
    b.load_state_dict(a.state_dict())
    run(params, a, range(2, 4))
    run(twins, b, range(2, 4))
    assert same(params, twins)


@pytest.mark.parametrize(("narrow", "wide"), [(4, 8), (4, 32), (8, 32)])
def test_states_widen(narrow: int, wide: int) -> None:
    params = parameters(torch.bfloat16)
    first = LowBitAdamW(params, lr=1e-2, state_bits=narrow)
    run(params, first, range(4))
    second = LowBitAdamW(params, lr=1e-2, state_bits=wide)
    second.load_state_dict(saved(first))
    for p in params:
        if first.state[p]:
            for a, b in zip(
                states.moments(first.state[p], p.numel()), states.moments(second.state[p], p.numel()), strict=True
            ):
                scale = a.abs().max()
                torch.testing.assert_close(
                    a / scale, b / scale, rtol=0.065 if wide == 8 else 0, atol=0.005 if wide == 8 else 0
                )
            assert second.state[p]["bits"] == (32 if p.numel() < 4096 else wide)
    run(params, second, range(4, 6))


def test_torch_adamw_state_loads_at_32_bits() -> None:
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW(theirs, lr=1e-2)
    run(theirs, reference, range(3))
    optimizer = LowBitAdamW(ours, lr=1e-2, state_bits=32)
    optimizer.load_state_dict(saved(reference))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    run(ours, optimizer, range(3, 6))
    run(theirs, reference, range(3, 6))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


def test_24_bit_master_grows_to_32() -> None:
    params = parameters(torch.bfloat16)
    first = LowBitAdamW(params, lr=1e-2)
    run(params, first, range(3))
    expected = codec.join_master(params[0].detach().flatten(), first.state[params[0]]["extension"])
    second = LowBitAdamW(params, lr=0.0, weight_decay=0.0, master_bits=32)
    second.load_state_dict(saved(first))
    second.param_groups[0]["lr"] = 0.0
    run(params, second, range(1))
    assert torch.equal(second.state[params[0]]["master"], expected)


@pytest.mark.parametrize(
    ("written", "read", "says"),
    [
        ({"state_bits": 8}, {"state_bits": 4}, "state_bits=8"),
        ({"state_bits": 32}, {"state_bits": 8}, "state_bits=32"),
        ({"master_bits": 32}, {"master_bits": 24}, "master_bits=32"),
        ({"master_bits": 24}, {"master_bits": 16}, "master_bits=24"),
    ],
)
def test_narrowing_is_refused(written: dict, read: dict, says: str) -> None:
    params = parameters(torch.bfloat16)
    first = LowBitAdamW(params, **written)
    run(params, first, range(2))
    second = LowBitAdamW(params, **read)
    run(params, second, range(1))
    before = saved(second)
    with pytest.raises(ValueError, match=says):
        second.load_state_dict(saved(first))
    after = saved(second)
    assert str(before) == str(after)


def test_damaged_states_are_refused() -> None:
    params = parameters(torch.bfloat16)
    first = LowBitAdamW(params)
    run(params, first, range(2))

    def damaged(change) -> dict:
        file = saved(first)
        change(file["state"][0])
        return file

    def cut_short(state: dict) -> None:
        state["m"] = state["m"][:-1]

    for change, says in (
        (cut_short, "parameter 0.*m is torch.uint8"),
        (lambda s: s.pop("v"), "lacks v"),
        (lambda s: s.update(v_scale=s["v_scale"].double()), "v_scale"),
        (lambda s: s.update(bits=5), "says 5 bits"),
        (lambda s: s.pop("m_scale"), "m_scale is None"),
        (lambda s: s["m_scale"].fill_(float("nan")), "m_scale holds values that are not finite"),
        (lambda s: s["v_scale"].fill_(float("inf")), "v_scale holds values that are not finite"),
        (lambda s: s["v_scale"].fill_(-1.0), "v_scale holds values below zero"),
        (lambda s: s.update(step=-1), "step is -1"),
        (lambda s: s.update(step="x"), "step is 'x'"),
        (lambda s: s.update(index=2**70), "index is"),
    ):
        second = LowBitAdamW(params)
        with pytest.raises(ValueError, match=says):
            second.load_state_dict(damaged(change))
        assert not second.state
    with pytest.raises(ValueError, match="groups"):
        LowBitAdamW(params[:2]).load_state_dict(saved(first))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda g: g.pop("betas"), "another one than AdamW"),
        (lambda g: g.update(maximize=True), "another one than AdamW"),
        (lambda g: g.update(amsgrad=True), "another one than AdamW"),
        (lambda g: g.update(betas=(2.0, 2.0)), "betas is"),
        (lambda g: g.update(lr=float("nan")), "lr is nan"),
        (lambda g: g.update(eps=0.0), "eps is"),
        (lambda g: g.update(format=99), "layout 99"),
    ],
)
def test_damaged_or_foreign_groups_are_refused(change, says: str) -> None:
    params = parameters(torch.bfloat16)
    first = LowBitAdamW(params)
    run(params, first, range(2))
    file, before = saved(first), str(saved(first))
    change(file["param_groups"][0])
    with pytest.raises(ValueError, match=says):
        first.load_state_dict(file)
    assert str(saved(first)) == before


def test_what_is_no_state_dict_is_refused() -> None:
    for thing in ({}, {"state": {}}, []):
        with pytest.raises(ValueError, match="no optimizer's state dict"):
            LowBitAdamW(parameters()).load_state_dict(thing)


@pytest.mark.parametrize("options", [{"maximize": True}, {"amsgrad": True}])
def test_another_adamw_is_refused(options: dict) -> None:
    params = parameters()
    reference = torch.optim.AdamW(params, **options)
    run(params, reference, range(1))
    with pytest.raises(ValueError, match="another one than AdamW"):
        LowBitAdamW(params, state_bits=32).load_state_dict(saved(reference))


def test_hooks_of_loading_see_the_states() -> None:
    params = parameters()
    optimizer = LowBitAdamW(params)
    run(params, optimizer, range(1))
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, file: seen.append(len(file["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(saved(optimizer))
    assert seen == [6, 6]  # the empty parameter has none
    optimizer.register_load_state_dict_pre_hook(lambda o, file: {**file, "state": {}})
    optimizer.load_state_dict(saved(optimizer))
    assert not optimizer.state
