"""int4.cu compiles for every GPU that it is for, and on one (mark ``gpu``) it equals ``int4``.

Where the instruction is emulated, on Hopper, it is run for its values alone.
"""

from __future__ import annotations

import os

import pytest
import torch

from hf_lowmem import codec
from hf_lowmem.integers import engine4_of, goes_wrong4
from hf_lowmem.kernels import cuda_int4, int4, nvrtc
from hf_lowmem.kernels.int4 import Rows4, packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def library():
    """NVRTC, torch's own or from a folder that HF_LOWMEM_NVRTC names."""
    try:
        return nvrtc.find_nvrtc(os.environ.get("HF_LOWMEM_NVRTC", "").split())
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0)])
def test_it_compiles(capability) -> None:
    binary = nvrtc.compiled(cuda_int4.SOURCE.read_text(encoding="utf-8"), capability, library())
    assert binary[:4] == b"\x7fELF"
    for name in (b"int4_product", b"int4_rotated_rows", b"int4_rotated_back"):
        assert name in binary


def test_what_the_compiler_says_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        nvrtc.compiled("__global__ void f() { nothing_of_that_name(); }", (8, 0), library())


def test_for_which_gpus() -> None:
    able = {c for c in ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)) if cuda_int4.able(c)}
    assert able == {(7, 5), (8, 0), (8, 6), (8, 9)}


# -- on a GPU -----------------------------------------------------------------------------------------------------
@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(cuda_int4, "EMULATED", True)
    engine4_of.cache_clear()
    yield
    engine4_of.cache_clear()


def rows(count: int, columns: int, digits: int, seed: int) -> Rows4:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (digits, count, columns), dtype=torch.int8, generator=generator)
    if digits == 2:
        codes[0].clamp_(-7, 7)
    return packed(codes, torch.rand(count, generator=generator) - 0.5)


def there(x: Rows4) -> Rows4:
    return Rows4(x.codes.cuda(), None if x.scale is None else x.scale.cuda(), x.columns)


SHAPES = [(1, 1, 1), (17, 33, 5), (128, 128, 128), (129, 130, 127), (300, 1000, 77), (3, 4097, 260), (1500, 64, 1300)]


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [*SHAPES, (0, 8, 3), (3, 8, 0), (2, 0, 3)])
@pytest.mark.parametrize("digits", [1, 2])
def test_products_of_any_size(m, k, n, digits) -> None:
    a, b = rows(m, k, digits, 0), rows(n, k, 1, 1)
    for dtype in DTYPES:
        for bias in (None, torch.randn(n).to(dtype)):
            expected = int4.product(a, b, dtype, bias)
            found = cuda_int4.product(there(a), there(b), dtype, None if bias is None else bias.cuda())
            assert torch.equal(found.cpu(), expected), (dtype, bias is None)
    plain = cuda_int4.product(Rows4(a.codes.cuda(), None, k), Rows4(b.codes.cuda(), None, k), torch.float32)
    assert torch.equal(plain.cpu().long(), a.values().long() @ b.values().long().t())


@pytest.mark.gpu
def test_the_largest_sums() -> None:
    full = packed(torch.full((2, 3, 100_000), 7, dtype=torch.int8), None)
    other = packed(torch.full((1, 3, 100_000), -8, dtype=torch.int8), None)
    assert (cuda_int4.product(there(full), there(other), torch.float32).double() == -119 * 8 * 100_000).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (37, 100), (64, 576), (20, 4096), (3, 16384), (2, 60001)])
def test_matrices_have_the_same_bits(dtype, shape) -> None:
    x, scale = torch.randn(shape).to(dtype), torch.rand(shape[1]) - 0.5
    x[0, 0] = 50
    key = codec.tensor_key(1, 2, 3)
    pairs = [
        (cuda_int4.rotated_rows(x.cuda())[0], int4.rotated_rows(x)[0]),
        (cuda_int4.turned_rows(x.cuda()), int4.turned_rows(x)),
        (cuda_int4.split_rows(x.cuda(), scale.cuda(), key), int4.split_rows(x, scale, key)),
    ]
    for found, expected in pairs:
        assert torch.equal(found.codes.cpu(), expected.codes)
        assert expected.scale is None or torch.equal(found.scale.cpu(), expected.scale)
    assert torch.equal(cuda_int4.rotated_back(x.cuda()).cpu(), int4.rotated_back(x))


@pytest.mark.gpu
def test_what_is_not_finite_and_zero_rows() -> None:
    x, w = torch.randn(8, 128), torch.randn(5, 128)
    x[1, 3], x[2, 4], x[3, 5], x[4] = float("nan"), float("inf"), -float("inf"), 0
    for dtype in DTYPES:
        pair = cuda_int4.rotated_rows(x.cuda())[0], cuda_int4.rotated_rows(w.cuda())[0]
        for out in (cuda_int4.product(*pair, dtype), cuda_int4.product(*pair[::-1], dtype).t()):
            assert out.isnan().all(1).tolist() == [False, True, True, True] + [False] * 4
            assert not out[[1, 2, 3]].isfinite().any()
            assert not out[4].any()


@pytest.mark.gpu
def test_the_engine_of_a_gpu(emulated) -> None:
    assert goes_wrong4(cuda_int4, torch.device("cuda", 0)) is None
    assert engine4_of(torch.device("cuda", 0)) is cuda_int4


@pytest.mark.gpu
def test_a_layer_has_the_bits_that_it_has_on_the_cpu(emulated) -> None:
    from hf_lowmem.lowbit import quantize, rounding_of

    torch.manual_seed(0)
    x, g = torch.randn(50, 512).bfloat16(), torch.randn(50, 256).bfloat16()
    plain = torch.nn.Linear(512, 256).bfloat16().state_dict()
    found = []
    for device in ("cpu", "cuda"):
        model = torch.nn.Sequential(torch.nn.Linear(512, 256)).to(device, torch.bfloat16)
        model[0].load_state_dict(plain)
        quantize(model, "int4")
        rounding_of(model).step = 3
        inputs = x.to(device).requires_grad_()
        out = model(inputs)
        grads = torch.autograd.grad(out, [inputs, model[0].weight], g.to(device))
        found.append([one.detach().cpu() for one in (out, *grads)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_in_a_thread_that_has_not_used_the_gpu(emulated) -> None:
    import threading

    a, b = rows(20, 64, 1, 0), rows(30, 64, 1, 1)
    pair, found = (there(a), there(b)), []
    thread = threading.Thread(target=lambda: found.append(cuda_int4.product(*pair, torch.float32).cpu()))
    thread.start()
    thread.join()
    assert torch.equal(found[0], int4.product(a, b, torch.float32))


@pytest.mark.gpu
def test_a_gpu_that_cannot_is_refused() -> None:
    device = torch.device("cuda", 0)
    if cuda_int4.able(torch.cuda.get_device_capability(device)):
        pytest.skip("this one can")
    with pytest.raises(ValueError, match='write compute="int8", or "auto"'):
        engine4_of(device)
