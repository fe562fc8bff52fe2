"""How weights are written in 8 and 4 bits, against plain arithmetic value by value."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from hf_lowmem import codec
from hf_lowmem.kernels.weights import FORMS, INT4, INT8, decode, empty, encode, recode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def written(x: torch.Tensor, form):
    codes, scale = empty(tuple(x.shape), form)
    encode(x, form, codes, scale)
    return codes, scale


def read(codes, scale, form, shape, dtype=torch.float32) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    decode(codes, scale, form, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96), (1, 32)])
def test_each_code_is_the_nearest(form, dtype, shape) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    codes, scale = written(x, form)
    assert (codes.dtype, scale.dtype) == (form.codes, form.scale)
    assert codes.nbytes + scale.nbytes == form.nbytes(shape)
    levels = range(-127, 128) if form is INT8 else range(-8, 8)
    back = read(codes, scale, form, shape).view(-1)
    steps = scale.float().view(-1).repeat_interleave(x.numel() // scale.numel())
    for value, found, step in zip(x.view(-1).tolist(), back.tolist(), steps.tolist(), strict=True):
        best = min(abs(level * Fraction(step) - Fraction(value)) for level in levels)
        assert abs(Fraction(found) - Fraction(value)) <= best + abs(Fraction(step)) / 2**10
    assert torch.equal(read(codes, scale, form, shape, dtype), back.view(shape).to(dtype))


def test_four_bits_lie_where_they_should() -> None:
    x = torch.tensor([[-8.0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7] + [7.0] * 16])
    codes, scale = written(x, INT4)
    assert scale.tolist() == [[1.0]]
    assert [byte & 15 for byte in codes[0].tolist()] == [int(v) + 8 for v in x[0, :16]]
    assert {byte >> 4 for byte in codes[0].tolist()} == {15}
    codes, scale = written(-x, INT4)
    assert scale.tolist() == [[-1.0]]
    assert torch.equal(read(codes, scale, INT4, x.shape), -x)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_spoils_its_neighbours_only(form, bad) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = bad
    back = read(*written(x, form), form, x.shape)
    spoilt = torch.zeros(3, 64, dtype=torch.bool)
    spoilt[1, : form.group] = True
    assert torch.equal(back.isnan(), spoilt)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_zeros_and_the_tiny_and_the_huge(form) -> None:
    x = torch.zeros(4, 32)
    x[1], x[2, 3] = 1e-45, 3e38
    x[3] = 2.0**-90
    back = read(*written(x, form), form, x.shape)
    assert not back[:2].any()
    assert math.isclose(back[2, 3], 3e38, rel_tol=0.01)
    assert torch.allclose(back[3], x[3], rtol=0.07, atol=0)


def test_reading_and_writing_again_changes_nothing() -> None:
    x = torch.randn(64, 256) * 0.02
    for form in FORMS.values():
        codes, scale = written(x, form)
        again, its_scale = written(read(codes, scale, form, x.shape), form)
        assert torch.equal(again, codes)
        assert torch.allclose(its_scale, scale, rtol=0 if form is INT4 else 1e-4, atol=0)


# -- without a master ---------------------------------------------------------------------------------------------
def test_what_has_not_changed_is_written_as_it_was() -> None:
    codes, scale = written(torch.randn(16, 64), INT8)
    before = codes.clone(), scale.clone()
    for step in range(20):
        recode(read(codes, scale, INT8, (16, 64)), codes, scale, codec.tensor_key(1, step, 2))
    assert torch.equal(codes, before[0])
    assert torch.equal(scale, before[1])


def test_small_changes_add_up_in_the_mean() -> None:
    """A thousandth of a unit a step, far under what rounding to nearest would see."""
    rows, steps = 400, 200
    x = torch.full((rows, 64), 0.5)
    x[:, 0] = 1.0
    codes, scale = written(x, INT8)
    unit = scale[0, 0].item()
    start = read(codes, scale, INT8, x.shape)[:, 1:].mean().item()
    for step in range(steps):
        now = read(codes, scale, INT8, x.shape)
        now[:, 1:] += 0.001 * unit
        recode(now, codes, scale, codec.tensor_key(1, step, 2))
    moved = (read(codes, scale, INT8, x.shape)[:, 1:].mean().item() - start) / unit
    # of 25,200 values, each moved by 0.2 units with a variance of about 0.2
    assert abs(moved - 0.001 * steps) < 5 * math.sqrt(0.2 / (rows * 63))


def test_a_row_that_has_outgrown_its_scale_is_given_room() -> None:
    x = torch.randn(2, 64)
    codes, scale = written(x, INT8)
    before = scale.clone()
    x[1, 3] = 100.0
    recode(x, codes, scale, 5)
    assert scale[0] == before[0]
    assert math.isclose(scale[1].item(), 100 / 126.99 * 17 / 16, rel_tol=1e-6)
    assert (read(codes, scale, INT8, x.shape) - x).abs().max() <= scale[1]
    x[0, 0] = float("inf")
    recode(x, codes, scale, 6)
    assert read(codes, scale, INT8, x.shape)[0].isnan().all()
