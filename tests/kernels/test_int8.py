"""Matrices in 8 bits and their products, against exact arithmetic."""

from __future__ import annotations

import pytest
import torch

from hf_lowmem import codec
from hf_lowmem.kernels import int8
from hf_lowmem.kernels.int8 import (
    Rows,
    integer_product,
    product,
    quantize_both,
    quantize_columns,
    quantize_rows,
    rotated_rows,
    turned_codes,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(rows: int, columns: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, max(rows, 1))[:rows, None]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (17, 64), (5, 257)])
def test_largest_is_the_largest_code_and_errors_are_half_a_unit(dtype, shape) -> None:
    x = matrix(*shape, dtype)
    rows = quantize_rows(x)
    assert rows.codes.dtype is torch.int8
    assert (rows.codes.abs().amax(1) == 127).all()
    error = (rows.dequantized().double() - x.double()).abs()
    assert (error <= 0.5001 * rows.scale[:, None].double()).all()


def test_the_scale_of_columns_comes_first() -> None:
    x, scale = matrix(4, 50), torch.rand(50)
    one, other = quantize_rows(x, scale), quantize_rows(x * scale)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scale, other.scale)


def test_exact_on_average_and_next_to_the_value() -> None:
    x = matrix(3, 90)
    nearest, total = quantize_rows(x), torch.zeros(3, 90, dtype=torch.float64)
    for key in range(2000):
        rows = quantize_rows(x, key=codec.tensor_key(1, 2, key))
        assert torch.equal(rows.scale, nearest.scale)
        units = x / rows.scale[:, None]
        assert ((rows.codes - units).abs() < 1.001).all()
        total += rows.codes
    error = total / 2000 - (x.double() / nearest.scale[:, None].double())
    assert error.abs().max() < 0.06
    assert error.mean().abs() < 0.004
    assert torch.equal(quantize_rows(x, key=7).codes, quantize_rows(x.clone(), key=7).codes)
    assert not torch.equal(quantize_rows(x, key=7).codes, quantize_rows(x, key=8).codes)


@pytest.mark.parametrize("key", [None, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row_and_nothing_else(key, bad) -> None:
    x = matrix(4, 40)
    x[2, 7] = bad
    rows = quantize_rows(x, key=key)
    assert rows.scale.isnan().tolist() == [False, False, True, False]
    assert not rows.codes[2].any()
    other = quantize_rows(matrix(6, 40, seed=1))
    assert product(rows, other, torch.float32).isnan().all(1).tolist() == [False, False, True, False]
    assert product(other, rows, torch.bfloat16).isnan().all(0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("key", [None, 3])
def test_zeros_and_what_is_as_good_as_zero(key) -> None:
    x = torch.zeros(3, 20)
    x[1] = 1e-45
    x[2] = 2.0**-100
    rows = quantize_rows(x, key=key)
    assert rows.scale.tolist()[:2] == [0.0, 0.0]
    assert not rows.codes[:2].any()
    assert (rows.codes[2] == 127).all()


def test_the_largest_numbers() -> None:
    x = torch.tensor([[3.4e38, -3.4e38, 1.0], [65504.0, 1.0, -65504.0]])
    rows = quantize_rows(x)
    assert rows.codes.tolist() == [[127, -127, 0], [127, 0, -127]]
    assert rows.scale.isfinite().all()


@pytest.mark.parametrize(
    ("columns", "number"), [(96, 1), (127, 1), (128, 4), (256, 4), (512, 16), (2048, 64), (2056, 4)]
)
def test_a_rotation_leaves_products_as_they_are(columns, number) -> None:
    assert int8.pieces(columns) == number
    x, w = torch.randn(40, columns), torch.randn(30, columns) / columns**0.5
    (one, scale), (other, _) = rotated_rows(x), rotated_rows(w)
    assert torch.equal(scale, quantize_rows(x).scale)
    exact = x.double() @ w.double().t()
    assert ((product(one, other, torch.float32) - exact).norm() / exact.norm()) < 0.02
    x[:, 5] *= 50  # without it, what the other columns hold is lost
    exact = x.double() @ w.double().t()
    pairs = {"rotated": (rotated_rows(x)[0], other), "as it lies": (quantize_rows(x), quantize_rows(w))}
    error = {name: (product(*pair, torch.float32) - exact).norm() for name, pair in pairs.items()}
    assert error["rotated"] < {1: 1.01, 4: 0.8, 16: 0.5, 64: 0.4}[number] * error["as it lies"]


def test_rotated_rows_that_are_not_finite_or_zero() -> None:
    x = torch.randn(4, 128)
    x[1], x[2, 7], x[3, 9] = 0, float("nan"), float("inf")
    rows, scale = rotated_rows(x)
    for found in (rows.scale, scale):
        assert found.isnan().tolist() == [False, False, True, True]
        assert found[1] == 0
    assert not rows.codes[1].any()
    for shape in ((0, 128), (3, 0)):
        assert rotated_rows(torch.zeros(shape))[0].codes.shape == shape


@pytest.mark.parametrize("key", [None, 3])
def test_columns_are_rows_of_the_transpose(key) -> None:
    x, scale = matrix(9, 40), torch.rand(40)
    columns = quantize_columns(x, key)
    assert torch.equal(columns.scale, quantize_rows(x.t()).scale)
    assert columns.codes.is_contiguous()
    assert ((columns.codes.t() - x / columns.scale).abs() < 1.001).all()
    if key is None:
        assert torch.equal(columns.codes, quantize_rows(x.t()).codes)
        assert torch.equal(turned_codes(x, quantize_rows(x).scale), quantize_rows(x).codes.t())
    one, other = quantize_both(x, scale, key)
    assert torch.equal(one.codes, quantize_rows(x, scale, key).codes)
    assert torch.equal(other.codes, columns.codes)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (17, 33, 5), (64, 128, 96), (3, 5000, 2), (0, 8, 3), (2, 0, 3)])
def test_integer_products_are_exact(m, k, n) -> None:
    generator = torch.Generator().manual_seed(m + k)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    found = integer_product(a, b)
    assert found.dtype is torch.int32
    assert torch.equal(found.long(), a.long() @ b.long().t())
    if k == 5000:  # the largest sum there is
        full = torch.full((2, k), 127, dtype=torch.int8)
        assert (integer_product(full, -full) == -(127**2) * k).all()


def test_integer_products_of_every_layout() -> None:
    """torch 2.13's own takes strides of (1, 1) for others."""
    generator = torch.Generator().manual_seed(0)
    for m in (1, 2, 5):
        for k in (1, 2, 44):
            for n in (1, 3):
                a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator)
                b = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
                for one in (a, a.t().contiguous().t(), a.expand(m, k), a.repeat(2, 1)[::2]):
                    for other in (b, b.t().contiguous().t()):
                        assert torch.equal(integer_product(one, other).long(), one.long() @ other.long().t())


def test_rows_of_other_lengths_have_no_product() -> None:
    with pytest.raises(ValueError, match="rows of 4 codes have no product with rows of 5"):
        product(quantize_rows(torch.ones(2, 4)), quantize_rows(torch.ones(2, 5)), torch.float32)


def test_without_integer_products_the_same_sums(monkeypatch) -> None:
    """As on a device for which torch has none."""
    a = torch.randint(-127, 128, (7, 3000), dtype=torch.int8)
    b = torch.full((5, 3000), 127, dtype=torch.int8)

    class Elsewhere:
        def __init__(self, x):
            self.x = x

        shape = property(lambda self: self.x.shape)
        device = torch.device("meta")

        def __len__(self):
            return len(self.x)

        def __getitem__(self, at):
            return self.x[at]

    assert torch.equal(integer_product(Elsewhere(a), Elsewhere(b)), integer_product(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_rounded_once_from_fp32(dtype, bias) -> None:
    a, b = quantize_rows(matrix(9, 300) / 10), quantize_rows(matrix(11, 300, seed=1) / 10)
    added = torch.randn(11).to(dtype) if bias else None
    exact = a.dequantized().double() @ b.dequantized().double().t() + (0 if added is None else added.double())
    found = product(a, b, dtype, added)
    assert found.dtype is dtype
    size = a.dequantized().double().abs() @ b.dequantized().double().abs().t()
    unit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    assert ((found.double() - exact).abs() <= unit * exact.abs() + 1e-6 * size + 2.0**-25).all()
    plain = product(Rows(a.codes, None), Rows(b.codes, None), torch.float32)
    assert torch.equal(plain.long(), a.codes.long() @ b.codes.long().t())


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (17, 33, 5), (64, 128, 96), (300, 4096, 77)])
def test_on_a_gpu_the_same_bits(m, k, n) -> None:
    x, w = matrix(m, k, torch.bfloat16), matrix(n, k, torch.bfloat16, seed=1)
    for key in (None, 5):
        ours, theirs = quantize_rows(x.cuda(), key=key), quantize_rows(x, key=key)
        assert torch.equal(ours.codes.cpu(), theirs.codes)
        assert torch.equal(ours.scale.cpu(), theirs.scale)
    other = quantize_rows(w)
    on_gpu = product(ours, quantize_rows(w.cuda()), torch.bfloat16)
    assert torch.equal(on_gpu.cpu(), product(theirs, other, torch.bfloat16))
    assert int8.LEVELS == 127
