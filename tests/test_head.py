"""Deferred logits: models whose head and loss are computed together, and whoever reads the logits all the same."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_lowmem import LowMemConfig, LowMemTrainer, head, loss
from hf_lowmem.attachment import attach, detach
from hf_lowmem.head import DeferredLogits, DeferringLinear
from hf_lowmem.loss import use_chunked_loss, use_stock_loss

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks for it
CAP = {"head_dim": 8, "final_logit_softcapping": 3.0}
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 1.0}
MODELS = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": CAP,
    "Gemma3ForCausalLM": CAP,
    "GPT2LMHeadModel": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "MixtralForCausalLM": EXPERTS,
    "GraniteForCausalLM": {"logits_scaling": 8.0},
    "CohereForCausalLM": {"logit_scale": 0.25},
}


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Everything is deferred, and goes through in small chunks. Returns what was done, in order."""
    done: list[str] = []
    run, compute = loss._Fused.run, head.Source.compute
    monkeypatch.setattr(head, "WHOLE", 0)
    monkeypatch.setattr(loss, "LEAST", 5)
    monkeypatch.setattr(loss, "CHUNK", 1)
    monkeypatch.setattr(loss, "PIECE", 2 * 128)
    monkeypatch.setattr(loss._Fused, "run", lambda self: done.append("fused") or run(self))
    monkeypatch.setattr(head.Source, "compute", lambda self, *a: done.append("whole") or compute(self, *a))
    return done


def build(name: str = "LlamaForCausalLM", seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**SIZES, **MODELS[name], **changes})).to(dtype).train()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[0, 2:5] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    """Of each gradient's norm."""
    expected, actual = gradients(one), gradients(other)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= tolerance * gradient.norm(), name


def pair(name: str = "LlamaForCausalLM", **changes) -> tuple[nn.Module, nn.Module]:
    """The same model twice, the second one with our loss."""
    models = build(name, **changes), build(name, **changes)
    use_chunked_loss(models[1])
    return models


# -- models -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_learn_as_before_without_logits(made, name) -> None:
    models = pair(name)
    for seed in (0, 1):  # gradients are added up
        losses = []
        for model in models:
            outputs = model(**batch(seed), num_items_in_batch=torch.tensor(7))
            outputs.loss.backward()
            losses.append(outputs.loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        assert type(outputs.logits) is DeferredLogits
    assert made == ["fused"] * 2
    assert_close(*models)


@pytest.mark.parametrize("first", ["peft", "loss"])
def test_lora_needs_no_gradient_of_the_head(made, monkeypatch, first) -> None:
    from peft import LoraConfig, get_peft_model

    products = []
    product = loss._product
    monkeypatch.setattr(loss, "_product", lambda a, b, *more: products.append(a.shape) or product(a, b, *more))
    models = []
    for ours in (False, True):
        base = build()
        if ours and first == "loss":
            use_chunked_loss(base)
        model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"]))
        if ours and first == "peft":
            use_chunked_loss(model)
        model(**batch()).loss.backward()
        models.append(model)
    assert made == ["fused"]
    assert products == [(5, 128)] * 3 + [(3, 128)]  # of hidden states, chunk by chunk
    assert_close(*models)


def test_a_lora_of_the_head_gets_real_logits(made) -> None:
    from peft import LoraConfig, get_peft_model

    models = []
    for ours in (False, True):
        base = build()
        if ours:
            use_chunked_loss(base)
        model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "lm_head"]))
        model(**batch()).loss.backward()
        models.append(model)
    assert "fused" not in made
    assert_close(*models)


def test_streamed(made) -> None:
    reference, model = build(), build()
    attach(model, LowMemConfig(offload="cpu", debug=True), "cpu")
    use_chunked_loss(model)
    losses = [m(**batch(seed)).loss for m in (reference, model) for seed in (0, 1)]  # two forwards before a backward
    (losses[0] + losses[1]).backward()
    losses[3].backward()
    losses[2].backward()
    torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-6, atol=0)
    assert made == ["fused"] * 2
    assert_close(reference, model)
    detach(model)
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize(
    "changes", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}]
)
def test_trainer(tiny, tmp_path, made, changes) -> None:
    settings = {"optim": "cpu_adam32bit", "eval_strategy": "steps", "eval_steps": 2, **changes}
    data = {"eval_dataset": tiny.data(4)}
    runs = [
        tiny.fit(LowMemTrainer, tmp_path, trainer=data, optim_args=f"offload={share},master_bits=32", **settings)
        for share in ("none", "cpu")
    ]
    # Label smoothing takes the labels away, and evaluation needs the logits.
    assert made == [] if "label_smoothing_factor" in changes else made == ["fused"] * 4
    logs = [[log[k] for log in run.state.log_history for k in ("loss", "eval_loss") if k in log] for run in runs]
    assert len(logs[0]) == 6
    assert logs[0] == pytest.approx(logs[1], rel=1e-3 if "bf16" in changes else 1e-5)


def test_accelerate_widens_the_output_without_making_it(made) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # what a Trainer has left
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        reference, model = (accelerator.prepare_model(m) for m in pair())
        expected, outputs = reference(**batch()), model(**batch())
        for value in (expected.loss, outputs.loss):
            value.backward()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert made == ["fused"]
    assert outputs.logits.dtype is expected.logits.dtype is torch.float32
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-6, atol=0)
    assert_close(reference, model, 2e-2)  # both round to bf16 in the model
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    assert torch.equal(outputs.logits + 0, expected.logits)
    assert made == ["fused", "whole"]


# -- when logits are there as ever --------------------------------------------------------------------------------
def kind_of_logits(model: nn.Module, *args, **kwargs) -> type:
    return type(model(*args, **(kwargs or ({} if args else batch()))).logits)


def test_only_large_logits_in_training_with_labels_are_deferred(monkeypatch) -> None:
    _, model = pair()
    tokens = batch()["input_ids"]
    assert kind_of_logits(model) is DeferredLogits
    assert kind_of_logits(model, tokens, None, None, None, None, tokens) is DeferredLogits
    assert kind_of_logits(model, tokens) is torch.Tensor
    assert kind_of_logits(model, tokens, labels=None) is torch.Tensor
    with torch.no_grad():
        assert kind_of_logits(model) is torch.Tensor
    assert kind_of_logits(model.eval()) is torch.Tensor
    model.train()
    monkeypatch.setattr(head, "WHOLE", 2 * 9 * 128 * 4)
    assert kind_of_logits(model) is torch.Tensor
    monkeypatch.setattr(head, "WHOLE", 2 * 9 * 128 * 4 - 1)
    assert kind_of_logits(model) is DeferredLogits


def test_labels_are_forgotten_after_a_forward_that_failed() -> None:
    _, model = pair()
    with pytest.raises(TypeError):
        model(**batch(), num_items_in_batch="seven")
    assert type(model.lm_head(torch.ones(1, 3, 32))) is torch.Tensor


@pytest.mark.parametrize("what", ["hook", "pre-hook", "forward", "subclass", "own weight", "meta"])
def test_other_heads_are_left_alone(made, what) -> None:
    model = build()
    plain = model.lm_head
    if what == "subclass":
        model.lm_head = type("Mine", (nn.Linear,), {})(32, 128)
    use_chunked_loss(model)
    if what == "hook":
        plain.register_forward_hook(lambda module, args, output: output * 2)
    if what == "pre-hook":
        plain.register_forward_pre_hook(lambda module, args: None)
    if what == "forward":
        plain.forward = lambda x: nn.functional.linear(x, plain.weight)
    if what == "own weight":
        plain.weight = type("Own", (nn.Parameter,), {})(plain.weight.detach())
    inputs = batch()
    if what == "meta":
        model, inputs = model.to("meta"), {name: x.to("meta") for name, x in inputs.items()}
    assert kind_of_logits(model, **inputs) is not DeferredLogits
    assert made == []


def test_liger_and_other_losses_are_left_alone() -> None:
    model = build()
    model.loss_function = ForCausalLMLoss  # given on purpose
    use_chunked_loss(model)
    assert type(model.lm_head) is nn.Linear


def test_stock_again(made) -> None:
    before = {k: type(v) for k, v in vars(build()).items()}
    reference, model = pair()
    assert type(model.lm_head) is DeferringLinear
    assert repr(model) == repr(reference)
    use_chunked_loss(model)  # a second time
    use_stock_loss(model)
    assert {k: type(v) for k, v in vars(model).items()} == before
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert vars(model.lm_head).keys() == vars(reference.lm_head).keys()
    assert type(model.lm_head) is nn.Linear
    assert kind_of_logits(model) is torch.Tensor
    assert made == []


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_stands_alone(made, way) -> None:
    _, model = pair()
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    reference = build()
    reference.lm_head.weight.data.mul_(2)
    outputs = other(**batch())
    torch.testing.assert_close(outputs.loss, reference(**batch()).loss, rtol=1e-6, atol=0)
    assert type(outputs.logits) is DeferredLogits
    use_stock_loss(other)
    assert kind_of_logits(other) is torch.Tensor
    assert kind_of_logits(model) is DeferredLogits
    single = copy.deepcopy(model.lm_head)  # as PEFT's modules_to_save does
    assert type(single(torch.ones(1, 3, 32))) is torch.Tensor


# -- whoever reads them -------------------------------------------------------------------------------------------
class Doubled(torch.autograd.Function):
    """Is handed its inputs without being asked whether they are a subclass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


READERS = {
    "sum of squares": lambda x: x.square().mean(),
    "piece": lambda x: x[:, :-1].contiguous().view(-1, 128).log_softmax(-1)[:, 3].sum(),
    "in place": lambda x: x.div_(3).logsumexp(-1).mean() + x.mean(),
    "several": lambda x: torch.cat([x, x * 2]).tanh().sum(),
    "a scaled one": lambda x: (x * 0.5).float().exp().mean(),
    "function": lambda x: Doubled.apply(x).tanh().sum(),
    "function of a cast": lambda x: Doubled.apply((-x).to(torch.float32)).tanh().sum(),
    "a reversed scaling": lambda x: (1 / (2 + x * x)).sum() + (3 - x).tanh().sum() + (1 + 2 * x - 5).sigmoid().sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("reader", sorted(READERS))
def test_logits_have_their_values_and_gradients(reader, name, dtype) -> None:
    models = pair(name, dtype=dtype)
    values = []
    for model in models:
        outputs = model(**batch())
        values.append(READERS[reader](outputs.logits))
        (values[-1] + 0.1 * outputs.loss).backward()
    assert torch.equal(*values)
    assert_close(*models, 1e-5 if dtype is torch.float32 else 3e-2)


def test_logits_alone_have_the_same_gradients(made) -> None:
    models = pair("CohereForCausalLM")
    for model in models:
        model(**batch()).logits.square().mean().backward()
    assert all(torch.equal(g, gradients(models[1])[name]) for name, g in gradients(models[0]).items())
    assert made == ["fused", "whole"]


def test_what_a_tensor_is_asked_without_its_values(made) -> None:
    reference, model = pair(dtype=torch.bfloat16)
    expected, logits = reference(**batch()).logits, model(**batch()).logits
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == logits.size() == (2, 9, 128)
    assert (logits.dtype, logits.device, logits.ndim, len(logits)) == (torch.bfloat16, expected.device, 3, 2)
    assert (logits.numel(), logits.nbytes, logits.stride()) == (expected.numel(), expected.nbytes, expected.stride())
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.is_floating_point()
    assert {logits: 1}[logits] == 1
    same = (logits.to(torch.bfloat16), logits.to(logits.device), logits.to("cpu"), logits.contiguous())
    assert all(x is logits for x in same)
    wide = logits.float()
    assert (wide.dtype, wide.shape) == (torch.float32, logits.shape)
    assert made == ["fused"]
    assert torch.equal(wide.detach(), expected.float())
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert torch.equal(copy.deepcopy(logits.detach()), expected)
    assert logits.grad_fn is not None
    assert repr(logits) == repr(expected)
    assert made == ["fused", "whole", "whole"]  # the wide ones, and these; once each
    assert hash(logits) == id(logits)


def test_readers_in_inference_mode_do_not_spoil_the_graph() -> None:
    models = pair()
    for model in models:
        outputs = model(**batch())
        with torch.inference_mode():
            assert outputs.logits.argmax(-1).shape == (2, 9)
        outputs.logits.tanh().sum().backward()
    assert_close(*models, 0)


def test_logits_of_a_changed_weight_are_refused() -> None:
    _, model = pair()
    outputs = model(**batch())
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"18 tokens and 128 words .* changed in place"):
        outputs.logits.sum()
