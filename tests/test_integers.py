"""Linear layers whose products run in integers: values, gradients, engines, and what layers share."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from integer_layers import error, gradients, layer
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_lowmem.integers import Int8Linear, Rounding, engine_of, goes_wrong
from hf_lowmem.kernels import int8
from hf_lowmem.kernels.int8 import quantize_rows
from hf_lowmem.lowbit import quantize, rounding_of


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_weight", ["model", "int8"])
def test_close_to_the_plain_layer(kind, dtype, grad_weight) -> None:
    model, reference = layer(kind, dtype=dtype, grad_weight=grad_weight)
    x, g = torch.randn(3, 50, 96).to(dtype), torch.randn(3, 50, 80).to(dtype)
    out, found = gradients(model, x, g)
    exact_out, exact = gradients(reference.double(), x.double(), g.double())
    assert out.dtype is dtype
    assert out.shape == exact_out.shape
    assert 1e-4 < error(out, exact_out) < 0.015
    for name, value in exact.items():
        assert found[name].dtype is dtype
        assert error(found[name], value) < 0.02, name
    assert error(found["x"], exact["x"]) > 1e-4  # it has been through 8 bits


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("grad_weight", ["model", "int8"])
def test_gradients_are_exact_on_average(kind, grad_weight) -> None:
    """For the weights as they are rounded, and with int8 weight gradients for the tokens as they are."""
    model, _ = layer(kind, grad_weight=grad_weight)
    x, g = torch.randn(20, 96), torch.randn(20, 80)
    weight = model[0].weight.detach()
    rounded = quantize_rows(weight if kind == "linear" else weight.t()).dequantized().double()
    mean_x = mean_w = 0
    for _ in range(400):
        _, found = gradients(model, x, g)
        mean_x, mean_w = mean_x + found["x"].double() / 400, mean_w + found[0].double() / 400
    assert error(mean_x, g.double() @ rounded) < 2e-3
    tokens = x.double() if grad_weight == "model" else quantize_rows(x.t()).dequantized().double().t()
    exact = g.double().t() @ tokens
    assert error(mean_w, exact if kind == "linear" else exact.t()) < 2e-3


@pytest.mark.parametrize("shape", [(96,), (0, 96), (1, 96), (2, 0, 96), (2, 3, 4, 96)])
def test_any_shape_of_tokens(shape) -> None:
    model, reference = layer()
    x, g = torch.randn(shape), torch.randn(*shape[:-1], 80)
    out, found = gradients(model, x, g)
    exact_out, exact = gradients(reference, x, g)
    assert out.shape == exact_out.shape
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in exact.items()}
    assert all(v.isfinite().all() for v in found.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad) -> None:
    model, _ = layer(bias=False)
    x, g = torch.randn(5, 96), torch.randn(5, 80)
    x[1, 3] = bad
    assert model(x).isfinite().all(1).tolist() == [True, False, True, True, True]
    g[2, 7] = bad
    _, found = gradients(model, x, g)
    assert found["x"].isfinite().all(1).tolist() == [True, True, False, True, True]
    assert not found[0].isfinite().all()
    with torch.no_grad():
        model[0].weight[4, 4] = bad
    assert model(torch.ones(2, 96)).isnan().all(0).tolist() == [i == 4 for i in range(80)]


def test_frozen_weights_and_inputs_without_gradient() -> None:
    model, _ = layer()
    model[0].weight.requires_grad_(False)
    out = model(torch.randn(4, 96))
    out.sum().backward()
    assert model[0].weight.grad is None
    assert torch.equal(model[0].bias.grad, torch.full((80,), 4.0))
    model[0].requires_grad_(False)
    assert not model(torch.randn(4, 96)).requires_grad
    x = torch.randn(4, 96, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    first = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_autocast() -> None:
    model, reference = layer()
    x = torch.randn(4, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = model(x), reference(x)
    assert out.dtype is plain.dtype is torch.bfloat16
    assert error(out, plain) < 0.02
    out.float().sum().backward()
    assert x.grad.dtype is torch.float32
    assert model[0].weight.grad.dtype is torch.float32


def test_an_engine_is_tried_before_it_is_used(monkeypatch) -> None:
    pytest.importorskip("triton")
    from hf_lowmem.kernels import triton_int8

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    right = {name: getattr(int8, name) for name in ("product", "quantize_both", "rotated_rows", "turned_codes")}
    for wrong in (
        {"product": lambda *args: int8.product(*args) + 1},
        {"rotated_rows": lambda x: int8.rotated_rows(2 * x)},
        {"quantize_both": lambda x, *args: int8.quantize_both(-x, *args)},
        {"turned_codes": lambda *args: int8.turned_codes(*args) + 1},
    ):
        assert "other bits" in goes_wrong(SimpleNamespace(**{**right, **wrong}), device), wrong
    assert goes_wrong(SimpleNamespace(**right), device) is None
    assert engine_of(torch.device("cpu")) is int8
    engine_of.cache_clear()
    try:
        monkeypatch.setattr(triton_int8, "quantize_both", lambda *args: 1 / 0)
        with pytest.warns(RuntimeWarning, match="Triton cannot be used for integer products"):
            assert engine_of(torch.device("cuda")) is int8
    finally:
        engine_of.cache_clear()


@pytest.mark.gpu
def test_the_engine_of_a_gpu() -> None:
    from hf_lowmem.kernels import triton_int8

    assert engine_of(torch.device("cuda")) is triton_int8


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 50, 256])
def test_on_a_gpu_the_same_bits(kind, dtype, tokens) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(512, 256) if kind == "linear" else Conv1D(256, 512)
    x, g = torch.randn(tokens, 512).to(dtype), torch.randn(tokens, 256).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        model = nn.Sequential(copy.deepcopy(plain).to(device, dtype))
        quantize(model)
        rounding_of(model).step = 3
        out, found = gradients(model, x.to(device), g.to(device))
        results.append({"out": out.cpu(), "x": found["x"].cpu(), "weight": found[0].cpu()})
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


class Siblings(nn.Module):
    """Three layers that read one tensor, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList(nn.Linear(96, 64, bias=False) for _ in range(3))
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        x = x * 1  # what has a graph
        a, b, c = (layer(x) for layer in self.readers)
        return self.last(a * b + c)


def counted(monkeypatch, name: str) -> list:
    calls: list = []
    stock = getattr(int8, name)
    monkeypatch.setattr(int8, name, lambda *args, **kwargs: (calls.append(1), stock(*args, **kwargs))[1])
    return calls


def test_layers_that_read_one_tensor_share_its_codes(monkeypatch) -> None:
    torch.manual_seed(0)
    model = Siblings()
    alone = copy.deepcopy(model)
    quantize(model)
    x, g = torch.randn(20, 96), torch.randn(20, 64)
    rows, columns = counted(monkeypatch, "rotated_rows"), counted(monkeypatch, "quantize_columns")
    out, found = gradients(model, x, g)
    assert len(rows) == 2 + 4  # inputs and weights
    assert len(columns) == 2 + 4  # inputs, and in backward gradients
    quantize(alone)
    monkeypatch.setattr(Rounding, "_latest", property(lambda self: None, lambda self, value: None), raising=False)
    other, expected = gradients(alone, x, g)
    assert len(columns) == 2 + 4 + 4 + 4
    assert torch.equal(out, other)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_tensor_that_has_changed_is_read_anew() -> None:
    model, _ = layer(bias=False)
    x = torch.randn(5, 96, requires_grad=True) * 1
    before = model(x)
    x.mul_(2)
    assert torch.equal(model(x), 2 * before)
    x = torch.randn(5, 96)  # a buffer, of which not every way of filling it is counted
    before = model(x)
    x.data.copy_(2 * x)
    assert torch.equal(model(x), 2 * before)
    with torch.no_grad():
        before = model(x)
        x *= 2
        assert torch.equal(model(x), 2 * before)
    with torch.inference_mode():  # whose tensors count no writes
        y = torch.randn(5, 96)
        before = model(y)
        y *= 2
        assert torch.equal(model(y), 2 * before)


def test_nothing_is_kept_of_an_input_that_is_gone() -> None:
    model, _ = layer()
    x = torch.randn(5, 96, requires_grad=True) * 1
    with torch.no_grad():
        model(x)
    rounding = rounding_of(model)
    assert rounding._latest is not None
    del x
    assert rounding._latest is None


def test_a_second_backward_through_the_same_graph() -> None:
    model, _ = layer(bias=False)
    model[0].lowbit.rounding.step = 0
    x = torch.randn(20, 96)
    out = model(x)
    first = torch.autograd.grad(out.sum(), model[0].weight, retain_graph=True)[0]
    second = torch.autograd.grad(out.sum(), model[0].weight)[0]
    assert error(second, first) < 0.02  # with other random bits


def test_copied_and_pickled(tmp_path) -> None:
    model, _ = layer()
    x = torch.randn(5, 96)
    out = model(x)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert type(other[0]) is Int8Linear
        assert torch.equal(other(x), out)
        assert rounding_of(other) is not rounding_of(model)


def test_text_is_generated_with_the_weights_themselves() -> None:
    model, reference = layer()
    token = torch.randn(1, 1, 96)
    with torch.no_grad():
        assert not torch.equal(model(token), reference(token))  # as trained
        assert torch.equal(model.eval()(token), reference(token))
        assert not torch.equal(model(torch.randn(1, 20, 96)), reference(torch.randn(1, 20, 96)))


def test_outputs_may_be_written_in_place() -> None:
    for shape in ((20, 96), (2, 10, 96)):
        model, reference = layer()
        x = torch.randn(shape, requires_grad=True)
        found = []
        for module in (model, reference):
            y = module(x)
            y += 1
            y = torch.relu_(y)
            found.append(torch.autograd.grad(y.sum(), x)[0])
        assert error(*found) < 0.05


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_inputs_of_another_width(kind) -> None:
    model, _ = layer(kind)
    for width in (95, 64, 192):
        with pytest.raises(RuntimeError, match="a layer of 96 inputs was given"):
            model(torch.randn(40, width))


def test_frozen_inputs_let_weights_change_before_backward() -> None:
    model, _ = layer(bias=False)
    out = model(torch.randn(20, 96))
    with torch.no_grad():
        model[0].weight.mul_(2)
    out.sum().backward()
    assert model[0].weight.grad is not None
