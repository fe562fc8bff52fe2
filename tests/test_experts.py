"""Experts whose products run in integers: transformers' implementations, gradients, streaming, and what fails."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from hf_lowmem import LowMemTrainer
from hf_lowmem.experts import Grouped8, WithExperts, expert_parameters, outer_products
from hf_lowmem.integers import How, Linear8, Rounding
from hf_lowmem.kernels import int8
from hf_lowmem.kernels.int8 import quantize_rows
from hf_lowmem.lowbit import dequantize, quantize, rounding_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def moe(kind: str, implementation: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    if kind == "qwen3":
        config = transformers.Qwen3MoeConfig(
            **SIZES, head_dim=64, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2, intermediate_size=96
        )
    else:  # weights [experts, inputs, outputs], biases
        config = transformers.GptOssConfig(
            **SIZES, head_dim=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2
        )
    config.use_cache = False
    if implementation is not None:
        config._experts_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(config)


def losses(model: nn.Module):
    ids = torch.arange(60).view(2, 30) % 120
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    named = ((name.removeprefix("_orig_mod."), p) for name, p in model.named_parameters())
    return loss.detach(), {name: p.grad for name, p in named if p.grad is not None}


def error(found, exact) -> float:
    found, exact = found.double(), exact.double()
    return float((found - exact).norm() / exact.norm())


def experts_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if expert_parameters(m))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_close_to_the_plain_experts(monkeypatch, kind, implementation) -> None:
    model = moe(kind, implementation)
    plain = copy.deepcopy(model)
    names = quantize(model)
    assert sum("experts" in name for name in names) == 4
    used: list[type] = []
    for cls in (Grouped8, Linear8):
        stock = cls.apply
        monkeypatch.setattr(cls, "apply", lambda *args, cls=cls, stock=stock: (used.append(cls), stock(*args))[1])
    x, g = torch.randn(40, 128), torch.randn(40, 128)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(40)])
    weights = torch.rand(40, 2)
    results = []
    for module in (experts_of(model), experts_of(plain)):
        tokens, params = x.clone().requires_grad_(), dict(module.named_parameters())
        out = module(tokens, chosen, weights)
        out = out[0] if isinstance(out, tuple) else out
        grads = torch.autograd.grad(out, (tokens, *params.values()), g)
        results.append({"out": out.detach(), "x": grads[0], **dict(zip(params, grads[1:], strict=True))})
    assert used == ([Grouped8] * 2 if implementation == "grouped_mm" else [Linear8] * 8)
    for name, value in results[1].items():
        assert results[0][name].shape == value.shape
        assert error(results[0][name], value) < 0.03, name
    assert error(results[0]["out"], results[1]["out"]) > 1e-4


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_whole_model(implementation) -> None:
    model = moe("qwen3", implementation)
    plain = copy.deepcopy(model)
    quantize(model)
    (loss, grads), (exact_loss, exact) = losses(model), losses(plain)
    assert 0 < abs(loss - exact_loss) < 0.01 * exact_loss
    assert grads.keys() == exact.keys()


def test_taken_off_again() -> None:
    model = moe("qwen3")
    plain = copy.deepcopy(model)
    quantize(model)
    dequantize(model)
    assert rounding_of(model) is None
    assert torch.equal(losses(model)[0], losses(plain)[0])
    assert not any("lowbit" in vars(m) for m in model.modules())


def test_copied() -> None:
    model = moe("qwen3")
    quantize(model)
    other = copy.deepcopy(model)
    loss, grads = losses(model)
    found_loss, found = losses(other)
    assert torch.equal(loss, found_loss)
    assert all(torch.equal(grads[name], found[name]) for name in grads)
    dequantize(other)  # its own hooks, not those of the model that it was copied from
    assert rounding_of(model) is not None
    assert torch.equal(losses(other)[0], losses(moe("qwen3"))[0])


def test_quantized_in_parts_and_pickled(tmp_path) -> None:
    model = moe("qwen3")
    quantize(model)
    with pytest.raises(ValueError, match="computes in integers already"):
        quantize(model)
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(losses(model)[0], losses(other)[0])
    dequantize(model)
    assert torch.equal(losses(model)[0], losses(moe("qwen3"))[0])
    assert not any(isinstance(m, WithExperts) for m in model.modules())


def test_interrupted_and_in_threads() -> None:
    model = moe("qwen3")
    quantize(model)
    experts = experts_of(model)

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = experts.act_fn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        experts(torch.randn(5, 128), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2))
    handle.remove()
    assert not _get_current_function_mode_stack()

    def evaluate(tokens: int) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.arange(tokens)[None]).logits

    model.eval()
    expected = {tokens: evaluate(tokens) for tokens in (1, 24)}
    with ThreadPoolExecutor(4) as pool:
        for tokens, found in zip([1, 24] * 4, pool.map(evaluate, [1, 24] * 4), strict=True):
            assert torch.equal(found, expected[tokens])


def test_one_by_one_under_autocast() -> None:
    """As the plain experts, whose products autocast casts."""
    model = moe("qwen3", "eager")
    plain = copy.deepcopy(model)
    quantize(model)
    dtypes: list[list[torch.dtype]] = []
    for one in (model, plain):
        seen: list[torch.dtype] = []
        experts_of(one).act_fn.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = losses(one)
        dtypes.append(seen)
        assert loss.isfinite()
    assert set(dtypes[0]) == set(dtypes[1]) == {torch.bfloat16}


def test_after_a_forward_that_failed_products_are_torchs_again() -> None:
    model = moe("qwen3")
    quantize(model)
    experts = experts_of(model)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        experts(torch.randn(5, 77), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2))
    x, w = torch.randn(3, 128), experts.gate_up_proj[0]
    assert torch.equal(F.linear(x, w), x @ w.t())


@pytest.mark.parametrize("by_output", [True, False])
@pytest.mark.parametrize("ends", [[5, 5, 17, 30], [0, 30, 30, 30]])
def test_gradients_are_exact_on_average(by_output, ends) -> None:
    torch.manual_seed(0)
    last = torch.tensor(ends, dtype=torch.int32)
    stored = torch.randn(4, 70, 96) if by_output else torch.randn(4, 96, 70)
    stored.requires_grad_()
    weight = stored.transpose(1, 2) if by_output else stored  # [experts, inputs, outputs]
    x, g = torch.randn(30, 96, requires_grad=True), torch.randn(30, 70)
    how, mean_x = How(Rounding(), 0, "int8"), torch.zeros(30, 96, dtype=torch.float64)
    for _ in range(300):
        out = Grouped8.apply(x, weight, last, how)
        of_x, of_w = torch.autograd.grad(out, (x, stored), g)
        mean_x += of_x.double() / 300
    start = 0
    for group, end in enumerate(ends):
        rows, w = slice(start, end), weight[group].detach()
        exact = x[rows].detach() @ w
        assert error(out[rows].detach(), exact) < 0.02 or start == end
        rounded = quantize_rows(w.t()).dequantized().double()
        assert error(mean_x[rows], g[rows].double() @ rounded) < 4e-3 or start == end
        outer = x[rows].detach().t() @ g[rows]
        found = of_w[group].t() if by_output else of_w[group]
        assert torch.allclose(found, outer, rtol=1e-4, atol=1e-4)
        start = end


def test_rows_of_no_group_spoil_nothing() -> None:
    """As those of other processes' experts."""
    last = torch.tensor([4, 9], dtype=torch.int32)
    weight = torch.randn(2, 64, 64, requires_grad=True)
    x = torch.randn(12, 64, requires_grad=True)
    how = How(Rounding(), 0, "int8")
    how.rounding.step = 0
    of_x, of_w = torch.autograd.grad(Grouped8.apply(x, weight, last, how)[:9].sum(), (x, weight))
    how = How(Rounding(), 0, "int8")
    how.rounding.step = 0
    short = x[:9].detach().requires_grad_()
    expected = torch.autograd.grad(Grouped8.apply(short, weight, last, how).sum(), (short, weight))
    assert torch.equal(of_x[:9], expected[0])
    assert torch.equal(of_w, expected[1])


def test_which_parameters_are_experts() -> None:
    module = nn.Module()
    module.large, module.small = nn.Parameter(torch.zeros(2, 64, 64)), nn.Parameter(torch.zeros(9, 64, 4))
    module.flat = nn.Parameter(torch.zeros(64, 64))
    module.positions = nn.Parameter(torch.zeros(1, 64, 64))
    assert expert_parameters(module) == ["large"]
    assert expert_parameters(nn.Bilinear(64, 64, 64)) == []
    assert expert_parameters(nn.Conv1d(64, 64, 64)) == []


def test_outer_products_group_by_group() -> None:
    a, b, last = torch.randn(9, 5), torch.randn(9, 7), torch.tensor([2, 2, 9])
    found = outer_products(a, b, last, torch.float32)
    assert torch.allclose(found[0], a[:2].t() @ b[:2], atol=1e-6)
    assert not found[1].any()
    assert torch.allclose(found[2], a[2:].t() @ b[2:], atol=1e-5)
    assert int8.LEVELS == 127


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_streamed_the_same_bits(tiny, tmp_path, reentrant) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 3}
    if reentrant is not None:
        changes |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    weights = []
    for offload in ("none", "cpu", "0.5"):
        settings = f"compute=int8,offload={offload}"
        run = tiny.fit(LowMemTrainer, tmp_path, model=moe("qwen3"), optim_args=settings, **changes)
        weights.append(tiny.weights(run.model))
    assert all(tiny.equal_bits(weights[0], other) for other in weights[1:])
    plain = tiny.fit(LowMemTrainer, tmp_path, model=moe("qwen3"), **changes)
    assert not tiny.equal_bits(weights[0], tiny.weights(plain.model))


@pytest.mark.filterwarnings("ignore")
def test_in_a_compiled_model() -> None:
    model = moe("qwen3", "grouped_mm")
    quantize(model)
    rounding_of(model).step = 0
    loss, grads = losses(model)
    model.zero_grad()
    rounding_of(model)._counts.clear()
    found_loss, found = losses(torch.compile(model, backend="eager"))
    assert torch.equal(loss, found_loss)
    assert all(torch.equal(grads[name], value) for name, value in found.items())


@pytest.mark.gpu
@pytest.mark.parametrize("by_output", [True, False])
@pytest.mark.parametrize("ends", [[5, 5, 17, 300], [0, 290, 290, 290]])
def test_on_a_gpu_the_same_bits(by_output, ends) -> None:
    torch.manual_seed(0)
    stored = torch.randn(4, 160, 128) if by_output else torch.randn(4, 128, 160)
    x, g = torch.randn(300, 128).bfloat16(), torch.randn(300, 160).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        own = stored.to(device, torch.bfloat16).requires_grad_()
        weight = own.transpose(1, 2) if by_output else own
        tokens, last = x.to(device).requires_grad_(), torch.tensor(ends, dtype=torch.int32, device=device)
        how = How(Rounding(), 0, "int8")
        how.rounding.step = 0
        out = Grouped8.apply(tokens, weight, last, how)
        of_x, of_w = torch.autograd.grad(out, (tokens, own), g.to(device))
        end = ends[-1]
        results.append([one.detach().cpu() for one in (out[:end], of_x[:end], of_w)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert error(results[1][2], results[0][2]) < 0.01  # in bf16, by torch's own products


@pytest.mark.gpu
def test_a_model_on_a_gpu() -> None:
    model = moe("qwen3", "grouped_mm").to("cuda", torch.bfloat16)
    plain = copy.deepcopy(model)
    quantize(model)
    ids = torch.arange(60, device="cuda").view(2, 30)
    losses = []
    for one in (model, plain):
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad.isfinite().all() for p in one.parameters() if p.grad is not None)
    assert abs(losses[0] / losses[1] - 1) < 0.01
