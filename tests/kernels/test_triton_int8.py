"""The Triton kernels equal ``int8``, in the interpreter without a GPU, compiled on one (mark ``gpu``)."""

from __future__ import annotations

import pytest
import torch

from hf_lowmem import codec
from hf_lowmem.kernels import int8
from hf_lowmem.kernels.int8 import Rows

pytest.importorskip("triton")
from hf_lowmem.kernels import triton_int8

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, of the interpreter
if ON_GPU:
    pytestmark.append(pytest.mark.gpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def one_tiling(monkeypatch):
    """Without a GPU there is nothing to be tuned. And the interpreter takes numbers out of arrays in a way that
    numpy 2.4 has given up.
    """
    if not ON_GPU:
        import triton
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor, scope):
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        small = triton.Config({"ROWS": 16, "COLUMNS": 32, "DEPTH": 64}, num_warps=4, num_stages=2)
        monkeypatch.setattr(triton_int8._product, "configs", [small])


def matrix(rows: int, columns: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]).to(dtype)


def assert_same(x: torch.Tensor, column_scale=None, key=None) -> None:
    there = None if column_scale is None else column_scale.to(DEVICE)
    ours = triton_int8.quantize_rows(x.to(DEVICE), there, key)
    oracle = int8.quantize_rows(x, column_scale, key)
    assert torch.equal(ours.codes.cpu(), oracle.codes)
    assert torch.equal(ours.scale.cpu().view(torch.int32), oracle.scale.view(torch.int32)) or (
        torch.equal(ours.scale.cpu().isnan(), oracle.scale.isnan())
        and torch.equal(ours.scale.cpu().nan_to_num(0), oracle.scale.nan_to_num(0))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (5, 127), (4, 128), (2, 1024), (3, 2500)])
@pytest.mark.parametrize("key", [None, 0, codec.tensor_key(1, 2, 3), 2**64 - 1])
def test_rows_of_any_size(dtype, shape, key) -> None:
    assert_same(matrix(*shape, dtype), key=key)


@pytest.mark.parametrize("key", [None, 5])
def test_scaled_columns_and_any_strides(key) -> None:
    x = matrix(40, 30, torch.bfloat16)
    assert_same(x, torch.rand(30), key)
    assert_same(x.t(), torch.rand(40), key)
    assert_same(x[::2, 1::3], None, key)


@pytest.mark.parametrize("key", [None, 5])
def test_what_is_not_finite_tiny_or_huge(key) -> None:
    x = matrix(9, 50)
    x[1, 3], x[2, 4], x[3, 5] = float("nan"), float("inf"), -float("inf")
    x[4] = 0
    x[5] = 1e-45
    x[6] = 2.0**-100
    x[7, 0] = 3.4e38
    assert_same(x, None, key)


def test_ties_go_to_even() -> None:
    assert_same(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 33, 5), (40, 130, 70), (16, 64, 32), (0, 8, 3), (3, 8, 0)])
# The interpreter cuts off what bf16 has no room for, where a GPU rounds.
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_any_size(shape, dtype, bias) -> None:
    m, k, n = shape
    a, b = int8.quantize_rows(torch.randn(m, k)), int8.quantize_rows(torch.randn(n, k))
    added = torch.randn(n).to(dtype) if bias else None
    there = [Rows(x.codes.to(DEVICE), x.scale.to(DEVICE)) for x in (a, b)]
    found = triton_int8.product(*there, dtype, None if added is None else added.to(DEVICE))
    assert torch.equal(found.cpu(), int8.product(a, b, dtype, added))


def test_products_without_scales_and_of_other_layouts() -> None:
    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((20, 90), (90, 50)))
    found = triton_int8.product(Rows(a.to(DEVICE), None), Rows(b.to(DEVICE).t(), None), torch.float32)
    assert torch.equal(found.cpu().long(), a.long() @ b.long())
    full = torch.full((2, 5000), 127, dtype=torch.int8)
    found = triton_int8.product(Rows(full.to(DEVICE), None), Rows(-full.to(DEVICE), None), torch.float32)
    assert (found == -(127**2) * 5000).all()
    nan = Rows(a.to(DEVICE), torch.full((20,), float("nan"), device=DEVICE))
    assert triton_int8.product(nan, Rows(b.to(DEVICE).t(), None), torch.bfloat16).isnan().all()
