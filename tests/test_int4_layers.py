"""Layers that compute in 4 bits: values, gradients, by which door, and the GPUs that are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from integer_layers import error, gradients, layer
from torch import nn

from hf_lowmem import LowMemConfig, LowMemTrainer, attach, create_optimizer
from hf_lowmem.integers import Int8Linear, engine4_of, goes_wrong4
from hf_lowmem.kernels import cuda_int4, int4
from hf_lowmem.kernels.int8 import quantize_rows
from hf_lowmem.lowbit import chosen_compute, quantize, rounding_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
BIG = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_weight", ["model", "int8"])
def test_close_to_the_plain_layer(kind, dtype, grad_weight) -> None:
    model, reference = layer(kind, dtype=dtype, compute="int4", grad_weight=grad_weight)
    x, g = torch.randn(3, 50, 96).to(dtype), torch.randn(3, 50, 80).to(dtype)
    out, found = gradients(model, x, g)
    exact_out, exact = gradients(reference.double(), x.double(), g.double())
    assert out.dtype is dtype
    assert out.shape == exact_out.shape
    assert 0.02 < error(out, exact_out) < 0.2
    assert 0.02 < error(found["x"], exact["x"]) < 0.15
    for name in (0, 1):  # of the weight and the bias
        assert found[name].dtype is dtype
        assert error(found[name], exact[name]) < 0.02, name


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_gradients_are_exact_on_average(kind) -> None:
    """For the rotated weights as they are rounded, and the tokens as they are in 8 bits."""
    model, _ = layer(kind, compute="int4")
    x, g = torch.randn(20, 96), torch.randn(20, 80)
    weight = model[0].weight.detach()
    rounded = int4.rotated_rows(weight if kind == "linear" else weight.t())[0].dequantized()
    mean_x = mean_w = 0
    for _ in range(300):
        _, found = gradients(model, x, g)
        mean_x, mean_w = mean_x + found["x"].double() / 300, mean_w + found[0].double() / 300
    assert error(mean_x, g.double() @ int4.rotated_back(rounded).double()) < 2e-3
    exact = g.double().t() @ quantize_rows(x.t()).dequantized().double().t()
    assert error(mean_w, exact if kind == "linear" else exact.t()) < 2e-3


@pytest.mark.parametrize("shape", [(96,), (0, 96), (1, 96), (2, 0, 96), (2, 3, 4, 96)])
def test_any_shape_of_tokens(shape) -> None:
    model, reference = layer(compute="int4")
    x, g = torch.randn(shape), torch.randn(*shape[:-1], 80)
    out, found = gradients(model, x, g)
    exact_out, exact = gradients(reference, x, g)
    assert out.shape == exact_out.shape
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in exact.items()}
    assert all(v.isfinite().all() for v in found.values())


@pytest.mark.parametrize("sizes", [(67, 71), (65, 129), (101, 64)])
def test_sizes_that_are_no_multiples_of_a_tile(sizes) -> None:
    plain = nn.Sequential(nn.Linear(*sizes))
    model = copy.deepcopy(plain)
    quantize(model, "int4")
    x, g = torch.randn(9, sizes[0]), torch.randn(9, sizes[1])
    out, found = gradients(model, x, g)
    exact_out, exact = gradients(plain, x, g)
    assert error(out, exact_out) < 0.25
    assert error(found["x"], exact["x"]) < 0.25


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad) -> None:
    model, _ = layer(bias=False, compute="int4")
    x, g = torch.randn(5, 96), torch.randn(5, 80)
    x[1, 3] = bad
    x[4] = 0
    out = model(x)
    assert out.isfinite().all(1).tolist() == [True, False, True, True, True]
    assert not out[4].any()
    g[2, 7] = bad
    _, found = gradients(model, x, g)
    assert found["x"].isfinite().all(1).tolist() == [True, True, False, True, True]
    assert not found[0].isfinite().all()
    with torch.no_grad():
        model[0].weight[4, 4] = bad
    assert model(torch.ones(2, 96)).isnan().all(0).tolist() == [i == 4 for i in range(80)]


def test_layers_of_both_widths_beside_each_other() -> None:
    """They read one tensor, each in its own bits."""
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(96, 64, bias=False) for _ in range(4))
    mixed = copy.deepcopy(plain)
    for i, one in enumerate(mixed):
        quantize(nn.Sequential(one), ("int8", "int4")[i % 2])
    for one in mixed[1:]:
        vars(one)["lowbit"] = type(one.lowbit)(mixed[0].lowbit.rounding, 1, "int8", bits=one.lowbit.bits)
    x = torch.randn(30, 96, requires_grad=True)
    tokens = x * 1
    outs = [one(tokens) for one in mixed]
    sum(out.square().sum() for out in outs).backward()
    for i, (one, other) in enumerate(zip(outs, plain, strict=True)):
        assert (0.02 if i % 2 else 0) < error(one, other(tokens)) < (0.2 if i % 2 else 0.02)
    assert all(one.weight.grad is not None for one in mixed)


# -- which GPUs ---------------------------------------------------------------------------------------------------
def pretended(monkeypatch, capability) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A card")
    engine4_of.cache_clear()
    return torch.device("cuda", 0)


@pytest.mark.parametrize("capability", [(7, 0), (9, 0), (10, 0), (12, 0)])
def test_gpus_that_cannot_are_refused(tiny, monkeypatch, capability) -> None:
    device = pretended(monkeypatch, capability)
    says = rf'to 8\.9\. A card has {capability[0]}\.{capability[1]}, .* write compute="int8", or "auto"'
    with pytest.raises(ValueError, match=says):
        engine4_of(device)
    model = tiny.model(**BIG)
    with pytest.raises(ValueError, match=says):
        attach(model, LowMemConfig(compute="int4"), device)
    assert rounding_of(model) is None
    monkeypatch.setattr(nn.Module, "parameters", lambda self, recurse=True: iter([type("P", (), {"device": device})]))
    with pytest.raises(ValueError, match=says):
        quantize(model, "int4")


def test_gpus_that_can(monkeypatch) -> None:
    device = pretended(monkeypatch, (8, 6))
    monkeypatch.setattr("hf_lowmem.integers.goes_wrong4", lambda engine, device: None)
    assert engine4_of(device) is cuda_int4
    engine4_of.cache_clear()
    monkeypatch.setattr("hf_lowmem.integers.goes_wrong4", lambda engine, device: 1 / 0)
    with pytest.warns(RuntimeWarning, match="4-bit products cannot be compiled"):
        assert engine4_of(device) is int4
    engine4_of.cache_clear()


def test_an_engine_is_tried_before_it_is_used() -> None:
    from types import SimpleNamespace

    names = ("product", "rotated_rows", "turned_rows", "split_rows", "rotated_back")
    right, device = {name: getattr(int4, name) for name in names}, torch.device("cpu")
    assert goes_wrong4(SimpleNamespace(**right), device) is None
    for wrong in (
        {"product": lambda *args: int4.product(*args) + 1},
        {"rotated_rows": lambda x: int4.rotated_rows(2 * x)},
        {"turned_rows": lambda x: int4.turned_rows(x.roll(1, 0))},
        {"split_rows": lambda x, *args: int4.split_rows(-x, *args)},
        {"rotated_back": lambda x: 2 * int4.rotated_back(x)},
    ):
        assert "other bits" in goes_wrong4(SimpleNamespace(**{**right, **wrong}), device), wrong


def test_auto_is_never_four_bits(monkeypatch) -> None:
    device = pretended(monkeypatch, (8, 6))
    monkeypatch.setattr("hf_lowmem.lowbit.engine_of", lambda device: None)
    assert chosen_compute(LowMemConfig(compute="auto"), device) == "int8"
    assert chosen_compute(LowMemConfig(compute="int4"), device) == "int4"
    engine4_of.cache_clear()


# -- training -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_streamed_and_checkpointed_the_same_bits(tiny, tmp_path, reentrant) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 3}
    whole = tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), optim_args="compute=int4", **changes)
    layers = [m for m in whole.model.modules() if isinstance(m, Int8Linear)]
    assert {m.lowbit.bits for m in layers} == {4}
    if reentrant is not None:
        changes |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for offload in ("none", "cpu"):
        settings = f"compute=int4,offload={offload}"
        run = tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), optim_args=settings, **changes)
        assert tiny.equal_bits(tiny.weights(whole.model), tiny.weights(run.model)), offload


def test_it_learns(tiny, tmp_path) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 80, "learning_rate": 3e-3, "logging_steps": 20}
    changes["per_device_train_batch_size"] = 16
    losses = []
    for compute in ("int4", "model"):
        settings = f"compute={compute}"
        run = tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), optim_args=settings, **changes)
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[1][-1] < 0.9 * losses[1][0]
    assert abs(sum(losses[0]) / sum(losses[1]) - 1) < 0.1


def test_in_a_loop_of_ones_own(tiny) -> None:
    model, config = tiny.model(**BIG), LowMemConfig(compute="int4", grad_weight="model")
    with pytest.raises(ValueError, match="compute changes what happens in a training step"):
        create_optimizer(model, config)
    attach(model, config, "cpu")
    how = model.model.layers[0].mlp.up_proj.lowbit
    assert (how.bits, how.grad_weight) == (4, "model")
    create_optimizer(model, config)


def test_experts_have_eight_bits() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 96, 80))

    model = nn.ModuleDict({"experts": Experts(), "layer": nn.Linear(96, 96)})
    assert quantize(model, "int4") == ["experts.weight", "layer"]
    assert model["layer"].lowbit.bits == 4
    assert model["experts"].lowbit.hows["weight"].bits == 8
