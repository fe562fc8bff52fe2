"""The Triton kernels equal ``int8``, in the interpreter without a GPU, compiled on one (mark ``gpu``)."""

from __future__ import annotations

import pytest
import torch

from hf_lowmem import codec
from hf_lowmem.kernels import int8
from hf_lowmem.kernels.int8 import Rows

pytest.importorskip("triton")
from hf_lowmem.kernels import triton_int8, triton_rows

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
    import triton

    if not ON_GPU:
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor, scope):
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        monkeypatch.setattr(triton_int8, "_copy_engine", lambda device: False)
        monkeypatch.setattr(triton_int8, "COPIED", (32, 64, 32, 4, 2))
    small = triton.Config({"ROWS": 32, "COLUMNS": 32, "DEPTH": 64}, num_warps=4, num_stages=2)
    monkeypatch.setattr(triton_int8._product, "configs", [small])


def can_copy() -> bool:
    return not ON_GPU or triton_int8._copy_engine(torch.device(DEVICE))


def matrix(rows: int, columns: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]).to(dtype)


def same_scales(ours: torch.Tensor, oracle: torch.Tensor) -> bool:
    """Also in their NaNs, whose bits may be others."""
    return torch.equal(ours.cpu().isnan(), oracle.isnan()) and torch.equal(
        ours.cpu().nan_to_num(0).view(torch.int32), oracle.nan_to_num(0).view(torch.int32)
    )


def moved(x: torch.Tensor) -> torch.Tensor:
    """To the device, with its strides."""
    if 0 in x.stride():
        return x[:1, :1].to(DEVICE).expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)


def assert_same(x: torch.Tensor, column_scale=None, key=None) -> None:
    """In every way of quantizing."""
    there, scale_there = moved(x), None if column_scale is None else column_scale.to(DEVICE)
    pairs = [
        (triton_int8.quantize_rows(there, scale_there, key), int8.quantize_rows(x, column_scale, key)),
        (triton_int8.quantize_columns(there, key), int8.quantize_columns(x, key)),
        *zip(triton_int8.quantize_both(there, scale_there, key), int8.quantize_both(x, column_scale, key), strict=True),
    ]
    for ours, oracle in pairs:
        known = ~oracle.scale.isnan()
        assert torch.equal(ours.codes.cpu()[known], oracle.codes[known])
        assert same_scales(ours.scale, oracle.scale)
    if column_scale is None and key is None:
        (ours, scale), (oracle, lying) = triton_int8.rotated_rows(there), int8.rotated_rows(x)
        known = ~oracle.scale.isnan()
        assert torch.equal(ours.codes.cpu()[known], oracle.codes[known])
        assert same_scales(ours.scale, oracle.scale)
        assert same_scales(scale, lying)
        turned, rows = triton_int8.turned_codes(there, pairs[0][0].scale), pairs[0][1]
        known = ~rows.scale.isnan()
        assert torch.equal(turned.cpu()[:, known], rows.codes.t()[:, known])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (5, 127), (4, 128), (2, 576), (3, 2048), (130, 260)])
@pytest.mark.parametrize("key", [None, 0, codec.tensor_key(1, 2, 3), 2**64 - 1])
def test_rows_of_any_size(dtype, shape, key) -> None:
    assert_same(matrix(*shape, dtype), key=key)


@pytest.mark.parametrize("key", [None, 5])
def test_scaled_columns_and_any_strides(key) -> None:
    x = matrix(40, 30, torch.bfloat16)
    assert_same(x, torch.rand(30), key)
    assert_same(x.t(), torch.rand(40), key)
    assert_same(x[::2, 1::3], None, key)
    assert_same(matrix(1, 1).expand(20, 30), None, key)


def test_a_row_longer_than_a_program_holds(monkeypatch) -> None:
    monkeypatch.setattr(triton_rows, "WHOLE", 64)
    for key in (None, 5):
        assert_same(matrix(3, 200), torch.rand(200), key)


def test_empty() -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert_same(torch.zeros(shape))


def test_rows_of_codes_begin_where_the_copy_engine_takes_them() -> None:
    rows, turned = triton_int8.quantize_both(matrix(37, 50).to(DEVICE))
    assert rows.codes.stride() == (64, 1)
    assert turned.codes.stride() == (48, 1)


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


@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 33, 5), (40, 130, 72), (70, 100, 136), (0, 8, 3), (3, 8, 0)])
# The interpreter cuts off what bf16 has no room for, where a GPU rounds.
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_products_of_any_size(monkeypatch, shape, dtype, bias, copied) -> None:
    m, k, n = shape
    if copied and (n * dtype.itemsize % 16 or not can_copy()):
        pytest.skip("needs rows of the result that are aligned, and Hopper where it does not run in the interpreter")
    monkeypatch.setattr(triton_int8, "_copy_engine", lambda device: copied)
    a, b = torch.randn(m, k), torch.randn(n, k)
    added = torch.randn(n).to(dtype) if bias else None
    there = [triton_int8.quantize_rows(x.to(DEVICE)) for x in (a, b)]
    found = triton_int8.product(*there, dtype, None if added is None else added.to(DEVICE))
    assert torch.equal(found.cpu(), int8.product(int8.quantize_rows(a), int8.quantize_rows(b), dtype, added))


def test_sums_too_long_for_an_integer(monkeypatch) -> None:
    a, b = (torch.randint(-127, 128, (5, 400), dtype=torch.int8) for _ in range(2))
    scales = torch.rand(2, 5)
    expected = int8.product(Rows(a, scales[0]), Rows(b, scales[1]), torch.float32, scales[0])
    for engine in (int8, triton_int8):
        monkeypatch.setattr(engine, "DEEPEST", 64)
        one, other = (Rows(x.to(DEVICE), y.to(DEVICE)) for x, y in zip((a, b), scales, strict=True))
        found = engine.product(one, other, torch.float32, scales[0].to(DEVICE))
        assert torch.equal(found.cpu(), expected)


def test_products_without_scales_and_of_other_layouts() -> None:
    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((20, 90), (90, 50)))
    found = triton_int8.product(Rows(a.to(DEVICE), None), Rows(b.to(DEVICE).t(), None), torch.float32)
    assert torch.equal(found.cpu().long(), a.long() @ b.long())
    full = torch.full((2, 5000), 127, dtype=torch.int8)
    found = triton_int8.product(Rows(full.to(DEVICE), None), Rows(-full.to(DEVICE), None), torch.float32)
    assert (found == -(127**2) * 5000).all()
    nan = Rows(a.to(DEVICE), torch.full((20,), float("nan"), device=DEVICE))
    assert triton_int8.product(nan, Rows(b.to(DEVICE).t(), None), torch.bfloat16).isnan().all()


@pytest.mark.parametrize(
    "ends", [[3, 3, 20, 20], [0, 0, 0, 33], [40], [7, 14, 21, 28, 35], [0, 0], [33, 66, 99, 100, 100, 130]]
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_products_by_groups(monkeypatch, ends, scaled, turned) -> None:
    if not ON_GPU:
        monkeypatch.setattr(triton_int8, "GROUPED_IN_LESS", (16, 32, 32, 4, 2))
    n, k, groups = 40, 90, len(ends)
    m = ends[-1] + 3  # rows of no group
    a = int8.quantize_rows(torch.randn(m, k))
    codes = torch.randint(-127, 128, (groups, n, k), dtype=torch.int8)
    scale = torch.rand(groups, n) if scaled else None
    there = Rows(a.codes.to(DEVICE), a.scale.to(DEVICE))
    moved_codes = codes.to(DEVICE)
    if turned:  # each group's columns one beside the other
        moved_codes = moved_codes.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    last = torch.tensor(ends, dtype=torch.int32)
    found = triton_int8.grouped_product(
        there, moved_codes, None if scale is None else scale.to(DEVICE), last.to(DEVICE), torch.float32
    )
    expected = int8.grouped_product(a, codes, scale, last, torch.float32)
    assert torch.equal(found.cpu()[: ends[-1]], expected[: ends[-1]])


@pytest.mark.parametrize("key", [None, 5])
def test_scaled_by_groups(monkeypatch, key) -> None:
    x, scale = matrix(20, 50, torch.bfloat16), torch.rand(3, 50)
    groups = torch.randint(0, 3, (20,))
    expected = int8.quantize_rows(x, scale, key, groups)
    for whole in (16384, 32):
        monkeypatch.setattr(triton_rows, "WHOLE", whole)
        found = triton_int8.quantize_rows(x.to(DEVICE), scale.to(DEVICE), key, groups.to(DEVICE))
        assert torch.equal(found.codes.cpu(), expected.codes)
        assert same_scales(found.scale, expected.scale)
