"""Models that compute in integers: what is swapped, by which door, streamed, resumed, under others' hooks."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from integer_layers import error
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_lowmem import LowMemConfig, LowMemTrainer, attach, create_optimizer
from hf_lowmem.integers import Int8Linear, engine_of
from hf_lowmem.kernels import int8
from hf_lowmem.lowbit import dequantize, quantize, rounding_of, roundings_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, for what is deterministic
BIG = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_is_swapped_and_what_is_not(tiny) -> None:
    model = tiny.model(**BIG)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    names = quantize(model)
    assert len(names) == 14  # seven in each of two layers, and not the head
    assert all(type(model.get_submodule(name)) is Int8Linear for name in names)
    assert type(model.lm_head) is nn.Linear
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    with pytest.raises(ValueError, match="computes in integers already"):
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


def test_under_accelerates_hooks(tiny) -> None:
    """They keep a module's forward beside it, and call that."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    ids = torch.arange(40).view(2, 20)
    model, plain, quantized = (tiny.model(**BIG) for _ in range(3))
    quantize(quantized)
    for before in (True, False):
        if not before:
            quantize(model)
        for module in list(model.modules()) if before else ():
            if isinstance(module, nn.Linear):
                add_hook_to_module(module, ModelHook())
    assert torch.equal(model(ids).logits, quantized(ids).logits)
    dequantize(model)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    other = tiny.model(**BIG)
    quantize(other)
    for module in other.modules():
        if isinstance(module, nn.Linear):
            add_hook_to_module(module, ModelHook())
    dequantize(other)
    assert torch.equal(other(ids).logits, plain(ids).logits)


def test_a_step_that_is_done_again_and_a_training_that_begins_again(tiny, tmp_path, monkeypatch) -> None:
    """After a backward that ran out of memory, and on a model that has been trained before."""
    changes = {"optim": "cpu_adam4bit", "max_steps": 2, "optim_args": "compute=int8"}
    whole = tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), **changes)

    class Fails(LowMemTrainer):
        failures = 0

        def training_step(self, *args, **kwargs):
            self._placement = SimpleNamespace(
                before_forward=lambda size: None, before_update=lambda: None, plan=object(), streamer=None
            )
            return super().training_step(*args, **kwargs)

        def _make_room(self, failed, again):
            again.restore()

        def _before_update(self):
            pass

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            if not Fails.failures:
                Fails.failures = 1
                loss.backward()
                raise torch.OutOfMemoryError("no room")
            return loss

    model = tiny.model(**BIG)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for cls in (Fails, LowMemTrainer):
        run = tiny.fit(cls, tmp_path, model=model, **changes)
        assert tiny.equal_bits(tiny.weights(whole.model), tiny.weights(run.model)), cls
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
    assert Fails.failures == 1


def test_parts_quantized_one_by_one(tiny, tmp_path) -> None:
    changes = {"optim": "cpu_adam4bit", "max_steps": 2}
    weights = []
    for _ in range(2):
        model = tiny.model(**BIG)
        for block in model.model.layers:
            quantize(block)
        assert len(roundings_of(model)) == 2
        run = tiny.fit(LowMemTrainer, tmp_path, model=model, **changes)
        weights.append(tiny.weights(run.model))
        assert [(r.seed, r.step) for r in roundings_of(model)] == [(42, 1), (43, 1)]
    assert tiny.equal_bits(*weights)


def test_heads_and_adapters_are_left_alone() -> None:
    from peft import LoraConfig, get_peft_model

    model = nn.Module()
    model.body, model.classifier, model.lm_head = (nn.Linear(96, 96) for _ in range(3))
    assert quantize(model) == ["body"]
    model = nn.Sequential(nn.Linear(96, 96))
    adapted = get_peft_model(model, LoraConfig(r=64, target_modules=["0"]))
    names = quantize(adapted)
    assert [name.split(".")[-1] for name in names] == ["base_layer"]


def test_a_reference_that_is_only_evaluated_computes_like_the_trained_model(tiny, tmp_path) -> None:
    reference = tiny.model(**BIG)

    class Refers(LowMemTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)

    tiny.fit(Refers, tmp_path, model=tiny.model(**BIG), optim_args="compute=int8", max_steps=1)
    assert isinstance(reference.model.layers[0].mlp.up_proj, Int8Linear)


@pytest.mark.parametrize("setting", ["compute=int4", "weights=int4", "compute=int8", "weights=int8"])
def test_what_costs_accuracy_says_so(tiny, tmp_path, capsys, setting) -> None:
    args = {"optim": "cpu_adam4bit", "optim_args": setting, "max_steps": 1}
    tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(**BIG), **args)
    name, value = setting.split("=")
    assert (f'hf_lowmem: {name}="{value}" costs accuracy' in capsys.readouterr().out) == (value == "int4")
