"""The arithmetic of what rests where."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from torch import nn

from hf_lowmem import state
from hf_lowmem.config import LowMemConfig
from hf_lowmem.optim import LowBitAdamW
from hf_lowmem.plan import DoesNotFit, Footprint, Plan, footprint, spread, state_bytes


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("n", [1, 31, 32, 127, 128, 129, 255, 256, 257, 4096, 100_001])
def test_state_bytes_are_those_of_a_state(bits, n) -> None:
    assert state_bytes(n, bits) == state.nbytes(state.new_state(n, bits, 0))[0]


@pytest.mark.parametrize("state_bits", [4, 8, 32])
@pytest.mark.parametrize("master_bits", [16, 24, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_footprint_is_what_an_optimizer_holds(dtype, master_bits, state_bits) -> None:
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((80, 70), (10,), (300, 20))]
    frozen = nn.Parameter(torch.zeros(33, 3, dtype=dtype), requires_grad=False)
    optimizer = LowBitAdamW(params, state_bits=state_bits, master_bits=master_bits)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    size, held = footprint([*params, frozen], optimizer.widths()), optimizer.nbytes()
    weights = sum(p.nbytes for p in params)
    assert size == Footprint(weights + frozen.nbytes, held["master"], held["states"], weights)
    assert (size.kept, size.total) == (size.total - weights, sum((size.weights, size.masters, size.states, weights)))


def test_spread_is_even_and_whole() -> None:
    for count in range(1, 90):
        for streamed in range(count + 1):
            chosen = spread(count, Fraction(streamed, count))
            assert len(chosen) == streamed
            assert len(set(chosen)) == streamed
            gaps = [b - a for a, b in itertools.pairwise(chosen)]
            assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_explicit_setting_says_the_same() -> None:
    for count in (1, 2, 7, 28, 32, 61, 80, 126):
        for streamed in range(count + 1):
            plan = Plan(count, streamed, Footprint(), Footprint(), 0)
            share = LowMemConfig(offload=plan.offload).offload_share
            assert spread(count, share) == spread(count, Fraction(streamed, count)), (count, streamed)


def test_table_and_refusal() -> None:
    on_gpu, in_ram = Footprint(10**9, 5 * 10**8, 53 * 10**7, 10**9), Footprint(4 * 10**9, 0, 0, 2 * 10**9)
    plan = Plan(8, 3, on_gpu, in_ram, 2 * 10**9, gpu_budget=6 * 10**9, ram_budget=7 * 10**9)
    assert (plan.gpu, plan.ram, plan.fits, plan.offload) == (5_030_000_000, 6_000_000_000, True, "3/8")
    plan.check()
    rows = {line[:32].strip(): [line[32:42].strip(), line[42:].strip()] for line in plan.table().splitlines()}
    assert rows["weights"] == ["1.00 GB", "4.00 GB"]
    assert rows["masters"] == ["0.50 GB", "0 kB"]
    assert rows["together"] == ["5.03 GB", "6.00 GB"]
    assert rows["of"] == ["6.00 GB", "7.00 GB"]
    short = Plan(8, 3, on_gpu, in_ram, 2 * 10**9, ram_budget=5 * 10**9)
    assert not short.fits
    with pytest.raises(DoesNotFit, match=r"needs 6\.00 GB of RAM, and 5\.00 GB may.*max_grad_norm=0 saves 2\.00") as e:
        short.check({"max_grad_norm=0": (0, 2 * 10**9), "master_bits=16": (10**9, 0)})
    assert "master_bits" not in str(e.value)
    assert "together" in str(e.value)
    assert not Plan(8, 8, on_gpu, in_ram, 0, gpu_budget=0).fits
    with pytest.raises(DoesNotFit, match=r"needs 5\.03 GB of GPU memory, and 4\.00 GB may be taken"):
        Plan(8, 3, on_gpu, in_ram, 2 * 10**9, gpu_budget=4 * 10**9).check()
