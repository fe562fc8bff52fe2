"""The Triton kernels equal ``weights``, in the interpreter without a GPU, compiled on one (mark ``gpu``)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_lowmem import codec
from hf_lowmem.kernels import weights
from hf_lowmem.kernels.weights import FORMS, INT4, INT8, WeightForm, empty

pytest.importorskip("triton")
from hf_lowmem.kernels import triton_weights

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, of the interpreter
if ON_GPU:
    pytestmark.append(pytest.mark.gpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 2.0**-100, 2.0**-97, 3.4e38, 6e4]


@pytest.fixture(autouse=True)
def numbers_of_arrays(monkeypatch):
    """The interpreter takes numbers out of arrays in a way that numpy 2.4 has given up."""
    if ON_GPU:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of every size; the first ones hold what is special, if there are as many."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).view(-1, shape[-1])
    x *= torch.logspace(-6, 3, len(x))[:, None]
    if len(x) > 2 * len(SPECIAL):
        for row, value in enumerate(SPECIAL):
            x[row, row % shape[-1]] = value
            x[row + len(SPECIAL)] = value
    return x.view(shape).to(dtype)


def same(ours: Tensor, oracle: Tensor) -> bool:
    """Bit for bit, but for what a NaN carries."""
    ours, known = ours.cpu(), ~oracle.isnan()
    words = torch.int32 if oracle.dtype is torch.float32 else torch.int16
    return torch.equal(ours.isnan(), ~known) and torch.equal(ours.view(words)[known], oracle.view(words)[known])


def assert_same_parts(ours: tuple[Tensor, Tensor], oracle: tuple[Tensor, Tensor]) -> None:
    """The codes where they have a meaning."""
    assert same(ours[1], oracle[1])
    known = ~oracle[1].isnan().view(-1)
    mine, theirs = (codes.cpu().view(known.numel(), -1)[known] for codes in (ours[0], oracle[0]))
    assert torch.equal(mine, theirs)


def assert_same(x: Tensor, form: WeightForm, dtypes: list[torch.dtype] = DTYPES) -> None:
    shape = tuple(x.shape)
    ours, oracle = empty(shape, form, DEVICE), empty(shape, form)
    triton_weights.encode(x.to(DEVICE), form, *ours)
    weights.encode(x, form, *oracle)
    assert_same_parts(ours, oracle)
    for dtype in dtypes:
        found, expected = torch.empty(shape, dtype=dtype, device=DEVICE), torch.empty(shape, dtype=dtype)
        triton_weights.decode(oracle[0].to(DEVICE), oracle[1].to(DEVICE), form, found)
        weights.decode(*oracle, form, expected)
        assert same(found, expected), dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (3, 31), (2, 3, 64), (25, 96), (70, 160), (2, 2048), (3, 5000)])
def test_shapes(form, dtype, shape) -> None:
    if form.takes(shape):
        assert_same(weight(*shape, dtype=dtype), form)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_value_of_16_bits(form, dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    assert_same(x.view(-1, 64) if form is INT4 else x.view(64, -1), form, [dtype])
    beside = torch.stack((x, torch.full_like(x, 2.5)), 1).view(128, -1)
    assert_same(beside, form, [dtype])


def test_ties() -> None:
    half = torch.tensor([[-8.0, *[i + 0.5 for i in range(-8, 8)], *range(-8, 7)]])
    for x in (half, -half, torch.tensor([[3.0, -3.0] * 16, [-3.0, 3.0] * 16])):
        assert_same(x, INT4)
    assert_same(torch.tensor([[126.99, *[i + 0.5 for i in range(-126, 126)]]]), INT8)


@pytest.mark.parametrize("whole", [16384, 64])
def test_rows_longer_than_a_program_holds(monkeypatch, whole) -> None:
    monkeypatch.setattr(triton_weights, "WHOLE", whole)
    for columns in (64, 65, 200, 256):
        assert_same(weight(30, columns), INT8, [])
        assert_same_again(30, columns, 5)
    if ON_GPU and whole > 64:
        assert_same(weight(30, 40000, dtype=torch.bfloat16), INT8)
        assert_same_again(30, 40000, 5)


def assert_same_again(rows: int, columns: int, key: int) -> None:
    x = weight(rows, columns).nan_to_num(0).clamp(-1e30, 1e30)  # first what has scales
    oracle = empty((rows, columns), INT8)
    weights.encode(x, INT8, *oracle)
    after = weight(rows, columns) * (1 + 1e-3 * torch.randn(rows, columns))
    after[-1, 0] *= 1000  # out of its scale's reach
    ours = tuple(part.to(DEVICE, copy=True) for part in oracle)
    triton_weights.recode(after.to(DEVICE), *ours, key)
    weights.recode(after, *oracle, key)
    assert_same_parts(ours, oracle)


@pytest.mark.parametrize("key", [0, 2**64 - 1, codec.tensor_key(1, 2, 3)])
def test_recoding(key) -> None:
    for rows, columns in ((1, 1), (30, 65), (40, 256)):
        assert_same_again(rows, columns, key)


def test_what_has_not_changed_is_written_as_it_was() -> None:
    codes, scale = empty((21, 256), INT8, DEVICE)
    triton_weights.encode(weight(42, 256)[21:].contiguous().to(DEVICE), INT8, codes, scale)
    before, x = (codes.clone(), scale.clone()), torch.empty(21, 256, device=DEVICE)
    for step in range(3):
        triton_weights.decode(codes, scale, INT8, x)
        triton_weights.recode(x, codes, scale, codec.tensor_key(1, step, 2))
    assert torch.equal(codes, before[0])
    assert torch.equal(scale, before[1])
