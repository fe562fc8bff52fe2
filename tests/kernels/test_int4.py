"""Matrices in 4 bits and their products, against exact arithmetic."""

from __future__ import annotations

import pytest
import torch

from hf_lowmem import codec
from hf_lowmem.kernels import int4
from hf_lowmem.kernels.int4 import Rows4, packed, product, rotated, rotated_back, rotated_rows, split_rows, turned_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (17, 33, 5), (64, 128, 96), (3, 5000, 2), (0, 8, 3), (2, 0, 3), (5, 40, 0)]


def matrix(rows: int, columns: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, max(rows, 1))[:rows, None]
    return x.to(dtype)


def random_rows(rows: int, columns: int, digits: int = 1, seed: int = 0) -> Rows4:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randint(-8, 8, (digits, rows, columns), dtype=torch.int8, generator=generator)
    if digits == 2:
        low[0].clamp_(-7, 7)
    return packed(low, torch.rand(rows, generator=generator) - 0.5)


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 100])
def test_two_codes_a_byte(columns) -> None:
    codes = torch.randint(-8, 8, (1, 5, columns), dtype=torch.int8)
    rows = packed(codes, None)
    assert rows.codes.dtype is torch.uint8
    assert rows.codes.shape == (1, 5, -(-columns // 32) * 16)
    assert torch.equal(rows.values(), codes[0])
    assert not packed(torch.zeros_like(codes), None).codes.any()
    one = packed(torch.tensor([[[-8, 7, 1]]], dtype=torch.int8), None)
    assert one.codes[0, 0, :3].tolist() == [0x78, 0x01, 0]


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_integer_products_are_exact(m, k, n, digits) -> None:
    a, b = random_rows(m, k, digits), random_rows(n, k, seed=1)
    found = product(Rows4(a.codes, None, k), Rows4(b.codes, None, k), torch.float32)
    assert torch.equal(found.long(), a.values().long() @ b.values().long().t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_scales_and_bias(dtype, bias) -> None:
    a, b = random_rows(30, 200, 2), random_rows(20, 200, seed=1)
    added = torch.randn(20).to(dtype) if bias else None
    exact = a.dequantized().double() @ b.dequantized().double().t() + (0 if added is None else added.double())
    found = product(a, b, dtype, added)
    assert found.dtype is dtype
    unit = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    assert ((found.double() - exact).abs() <= unit * exact.abs() + 1e-3).all()


@pytest.mark.parametrize(
    ("columns", "how"), [(1, (1, 1)), (96, (16, 16)), (100, (4, 4)), (576, (64, 64)), (33, (1, 1))]
)
def test_a_rotation_is_undone_and_leaves_products_as_they_are(columns, how) -> None:
    assert int4.rotation(columns) == how
    x, w = torch.randn(40, columns), torch.randn(30, columns)
    (one, root), (other, _) = rotated(x), rotated(w)
    exact = x.double() @ w.double().t()
    assert ((one.double() @ other.double().t() / root**2 - exact).norm() / exact.norm()) < 1e-5
    back = rotated_back(one / root)
    assert (back - x).abs().max() < 1e-5
    assert rotated_back(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("columns", [33, 96, 512, 4096])
def test_close_to_the_product_also_where_a_column_is_large(columns) -> None:
    x, w = torch.randn(40, columns), torch.randn(30, columns)
    for largest in (1, 50):
        x[:, 5] *= largest
        exact = x.double() @ w.double().t()
        found = product(rotated_rows(x)[0], rotated_rows(w)[0], torch.float32)
        assert (found - exact).norm() / exact.norm() < (0.3 if columns > 33 else 0.8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (17, 64), (5, 257)])
def test_all_codes_are_used_and_errors_are_half_a_unit(dtype, shape) -> None:
    x = matrix(*shape, dtype)
    rows, scale = rotated_rows(x)
    wide, root = rotated(x.float())
    assert torch.equal(rows.scale, scale)
    assert ((rows.values() == -8).any(1) | (rows.values() == 7).any(1)).all()
    error = (rows.dequantized().double() - wide.double() / root).abs()
    assert (error <= 0.5001 * scale.abs()[:, None].double()).all()
    assert torch.equal(rotated_rows(-x)[0].dequantized(), -rows.dequantized())
    turned = turned_rows(x)
    assert torch.equal(turned.values(), rows.values().t())
    assert turned.scale is None


def test_gradients_are_exact_on_average_and_next_to_the_value() -> None:
    x, scale, total = matrix(3, 90), torch.linspace(-1, 2, 90), torch.zeros(3, 90, dtype=torch.float64)
    nearest = split_rows(x, scale, None)
    assert (nearest.values().abs().amax(1) == 119).all()
    units = (x * scale).double() / nearest.scale[:, None].double()
    for key in range(1500):
        rows = split_rows(x, scale, codec.tensor_key(1, 2, key))
        assert torch.equal(rows.scale, nearest.scale)
        assert ((rows.values() - units).abs() < 1.001).all()
        total += rows.values()
    assert (total / 1500 - units).abs().max() < 0.07
    assert (total / 1500 - units).mean().abs() < 0.005


def test_every_value_of_two_digits() -> None:
    values = torch.arange(-119, 120, dtype=torch.float32)
    rows = split_rows(values[None] * int4.UNIT8, torch.ones(239), None)
    assert rows.values().tolist() == [list(range(-119, 120))]
    high, low = Rows4(rows.codes[:1], None, 239).values(), Rows4(rows.codes[1:], None, 239).values()
    assert (high.min(), high.max(), low.min(), low.max()) == (-7, 7, -8, 7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row_and_nothing_else(bad) -> None:
    x = matrix(4, 128)
    x[2, 7] = bad
    other = rotated_rows(matrix(6, 128, seed=1))[0]
    for rows in (rotated_rows(x)[0], split_rows(x, torch.ones(128), 3)):
        assert rows.scale.isnan().tolist() == [False, False, True, False]
        assert not rows.values()[2].any()
        assert product(rows, other, torch.float32).isnan().all(1).tolist() == [False, False, True, False]
    assert product(other, rotated_rows(x)[0], torch.bfloat16).isnan().all(0).tolist() == [False, False, True, False]


def test_zeros_tiny_and_huge() -> None:
    x = torch.zeros(4, 64)
    x[1] = 1e-45
    x[2, 3] = 1.0
    x[3] = 3e38
    for rows in (rotated_rows(x)[0], split_rows(x, torch.ones(64), 3)):
        assert rows.scale[:2].tolist() == [0, 0]
        assert not rows.values()[:2].any()
        assert rows.dequantized()[:3].isfinite().all()
        assert rows.values()[2].any()
    assert rotated_rows(x)[0].scale[3].isnan()  # sums of 64 of them leave fp32
    for shape in ((0, 128), (3, 0)):
        assert rotated_rows(torch.zeros(shape))[0].values().shape == shape
        assert turned_rows(torch.zeros(shape)).values().shape == shape[::-1]
        assert split_rows(torch.zeros(shape), torch.zeros(shape[1]), 5).values().shape == shape


def test_what_has_no_product(monkeypatch) -> None:
    a, b = random_rows(3, 40), random_rows(3, 41)
    with pytest.raises(ValueError, match="rows of 40 codes have no product with rows of 41"):
        product(a, b, torch.float32)
    with pytest.raises(ValueError, match="one digit"):
        product(a, random_rows(3, 40, 2), torch.float32)
    monkeypatch.setattr(int4, "DEEPEST", 39)
    with pytest.raises(ValueError, match='write compute="int8"'):
        product(a, a, torch.float32)
