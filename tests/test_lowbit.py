"""Linear layers whose products run in integers: values, gradients, models, streaming."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from hf_lowmem import LowMemConfig, LowMemTrainer, attach, create_optimizer
from hf_lowmem.integers import Int8Linear, Rounding, engine_of, goes_wrong
from hf_lowmem.kernels import int8
from hf_lowmem.kernels.int8 import quantize_rows
from hf_lowmem.lowbit import dequantize, quantize, rounding_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, for what is deterministic
BIG = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def layer(kind="linear", bias=True, dtype=torch.float32, **options):
    torch.manual_seed(0)
    plain = nn.Linear(96, 80, bias=bias) if kind == "linear" else Conv1D(80, 96)
    model = nn.Sequential(plain.to(dtype))
    reference = copy.deepcopy(model)
    assert quantize(model, **options) == ["0"]
    return model, reference


def gradients(model, x, g):
    x = x.clone().requires_grad_()
    params = [p for p in model.parameters() if p.requires_grad]
    out = model(x)
    return out.detach(), dict(zip(["x", *range(len(params))], torch.autograd.grad(out, [x, *params], g), strict=True))


def error(found, exact) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


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


def test_what_is_swapped_and_what_is_not(tiny) -> None:
    model = tiny.model(**BIG)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    names = quantize(model)
    assert len(names) == 14  # seven in each of two layers, and not the head
    assert all(type(model.get_submodule(name)) is Int8Linear for name in names)
    assert type(model.lm_head) is nn.Linear
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    with pytest.raises(ValueError, match="has no linear layer that could compute in integers"):
        quantize(model)
    twin = copy.deepcopy(model)
    assert type(twin.get_submodule(names[0])) is Int8Linear
    assert rounding_of(model) is not None
    dequantize(model)
    assert rounding_of(model) is None
    tokens = torch.randint(3, 128, (2, 9))
    assert torch.equal(model(tokens).logits, tiny.model(**BIG)(tokens).logits)
    assert not torch.equal(twin(tokens).logits, model(tokens).logits)


def test_refused() -> None:
    with pytest.raises(ValueError, match="compute='int3' is none that layers can compute in: write \"int8\""):
        quantize(nn.Sequential(nn.Linear(64, 64)), compute="int3")
    with pytest.raises(ValueError, match="grad_weight='int4' is neither"):
        quantize(nn.Sequential(nn.Linear(64, 64)), grad_weight="int4")
    with pytest.raises(ValueError, match="no linear layer"):
        quantize(nn.Sequential(nn.Linear(63, 64)))


def test_of_gpt2_with_tied_head(tmp_path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()  # without dropout
    reference = copy.deepcopy(model)
    assert len(quantize(model)) == 8
    tokens = torch.randint(0, 100, (2, 16))
    losses = [m(tokens, labels=tokens).loss for m in (model, reference)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0] - losses[1]) < 0.01
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        # Of keys there is no gradient but rounding: a softmax does not see what all of its inputs share.
        if q.grad.norm() > 1e-4 and "c_attn.bias" not in name:
            assert error(p.grad, q.grad) < 0.1, name
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, reference(tokens).logits)


def test_under_lora(tiny) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(**BIG), LoraConfig(r=4, target_modules="all-linear"))
    names = quantize(model)
    assert len(names) == 14
    assert all(name.endswith("base_layer") for name in names)
    tokens = torch.randint(3, 128, (2, 9))
    model(input_ids=tokens, labels=tokens).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if "lora_" in name}


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


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["cpu", "0.5", "auto,gpu_memory=2GB"])
def test_on_a_gpu_streamed_the_same_bits(tiny, tmp_path, offload, deterministic) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 4, "use_cpu": False, "bf16": True, "gradient_checkpointing": True}
    weights = []
    for setting in ("0", offload):
        model = tiny.model(**BIG, dtype="bfloat16", num_hidden_layers=4)
        run = tiny.fit(LowMemTrainer, tmp_path, model=model, optim_args=f"compute=int8,offload={setting}", **changes)
        assert engine_of(torch.device("cuda")) is not int8
        weights.append({name: w.cpu() for name, w in tiny.weights(run.model).items()})
    assert tiny.equal_bits(*weights)


# -- what layers share --------------------------------------------------------------------------------------------
class Siblings(nn.Module):
    """Three layers that read one tensor, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList(nn.Linear(96, 64, bias=False) for _ in range(3))
        self.last = nn.Linear(64, 64)

    def forward(self, x):
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
    x = torch.randn(5, 96)
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
    x = torch.randn(5, 96)
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


@pytest.mark.filterwarnings("ignore")
def test_in_a_compiled_model(tiny) -> None:
    """It runs beside the compiled code, as it is."""
    torch.manual_seed(0)
    model = tiny.model(**BIG)
    quantize(model)
    model.model.layers[0].self_attn.q_proj.lowbit.rounding.step = 0
    ids = torch.arange(40).view(2, 20)
    compiled = torch.compile(model, backend="eager")
    for run in (model, compiled):
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        if run is model:
            expected = loss, grads
            rounding_of(model)._counts.clear()
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[1], strict=True))


# -- training -----------------------------------------------------------------------------------------------------
class Quantized(LowMemTrainer):
    """Trains with integer products; its rounding follows the steps."""

    def __init__(self, *args, model, **kwargs):
        quantize(model)
        super().__init__(*args, model=model, **kwargs)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_streamed_and_checkpointed_the_same_bits(tiny, tmp_path, reentrant) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 3}
    whole = tiny.fit(Quantized, tmp_path, model=tiny.model(**BIG), **changes)
    if reentrant is not None:
        changes |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for offload in ("none", "cpu", "0.5"):
        run = tiny.fit(Quantized, tmp_path, model=tiny.model(**BIG), optim_args=f"offload={offload}", **changes)
        assert tiny.equal_bits(tiny.weights(whole.model), tiny.weights(run.model)), offload


def test_it_learns_what_the_plain_model_learns(tiny, tmp_path) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 80, "learning_rate": 3e-3, "logging_steps": 20}
    changes["per_device_train_batch_size"] = 16
    runs = [tiny.fit(cls, tmp_path, model=tiny.model(**BIG), **changes) for cls in (Quantized, LowMemTrainer)]
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in runs]
    assert losses[1][-1] < 0.9 * losses[1][0]
    assert abs(sum(losses[0]) / sum(losses[1]) - 1) < 0.01


@pytest.mark.parametrize("settings", ["compute=int8", "compute=int8,grad_weight=model", "compute=auto"])
def test_by_a_setting(tiny, tmp_path, settings, capsys) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 2}
    run = tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), optim_args=settings, **changes)
    layers = [m for m in run.model.modules() if isinstance(m, Int8Linear)]
    if settings == "compute=auto":  # there is no GPU that would be fast
        assert not layers
        assert capsys.readouterr().out.count('what linear layers compute in: compute="model"') == 1
        return
    assert {m.lowbit.grad_weight for m in layers} == {"model" if "model" in settings else "int8"}
    cls = Quantized if "grad_weight" not in settings else None
    if cls is not None:
        other = tiny.fit(cls, tmp_path, model=tiny.model(**BIG), **changes)
        assert tiny.equal_bits(tiny.weights(run.model), tiny.weights(other.model))


def test_saved_and_resumed_as_if_it_had_gone_on(tiny, tmp_path) -> None:
    changes = {"optim": "cpu_adam4bit", "optim_args": "compute=int8", "gradient_accumulation_steps": 2, "save_steps": 2}
    whole = tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), save_strategy="steps", **changes)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), resume=checkpoint, **changes)
    assert tiny.equal_bits(tiny.weights(whole.model), tiny.weights(resumed.model))
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert not any(isinstance(m, Int8Linear) for m in plain.modules())


def test_own_loops_and_who_does_not_do_it(tiny) -> None:
    model, config = tiny.model(**BIG), LowMemConfig(compute="int8")
    with pytest.raises(ValueError, match="compute changes what happens in a training step"):
        create_optimizer(model, config)
    attach(model, config, "cpu")
    assert isinstance(model.model.layers[0].mlp.up_proj, Int8Linear)
    create_optimizer(model, config)
    attach(model, config, "cpu")  # it goes on so
    dequantize(model)
    attach(model, LowMemConfig(compute="int8", grad_weight="model", offload="cpu"), "cpu")
    assert model.model.layers[0].mlp.up_proj.lowbit.grad_weight == "model"
