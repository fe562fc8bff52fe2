"""LowMemTrainer with streamed blocks, against the same training unstreamed: equal bits, logs and checkpoints."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from transformers import TrainerCallback

from hf_lowmem import LowMemTrainer
from hf_lowmem import trainer as trainers
from hf_lowmem.attachment import streamer_of
from hf_lowmem.kernels import native
from hf_lowmem.link import HostLink
from hf_lowmem.overlap import overlap

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
QUIET = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
QUIET |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def history(trainer) -> list[dict[str, float]]:
    return [{k: v for k, v in log.items() if k not in QUIET} for log in trainer.state.log_history]


def fit(tiny, folder, offload, optim_args="", resume=None, trainer=None, model=None, layers=4, **changes):
    args = ",".join(filter(None, [optim_args, f"offload={offload}"]))
    model = tiny.model(num_hidden_layers=layers, dtype=changes.pop("dtype", "float32")) if model is None else model
    return tiny.fit(
        LowMemTrainer,
        folder,
        model=model,
        resume=resume,
        trainer=trainer,
        optim_args=args,
        **{"max_steps": 5, **changes},
    )


def assert_same(tiny, one, other) -> None:
    assert tiny.equal_bits(tiny.weights(one.model), tiny.weights(other.model))
    assert history(one) == history(other)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "max_grad_norm": 0.01},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3},
        {"bf16": True},
        {"dtype": "bfloat16", "gradient_accumulation_steps": 2},
    ],
    ids=["plain", "accumulated", "checkpointed", "unclipped", "unclipped accumulated", "autocast", "bf16"],
)
@pytest.mark.parametrize("optim", ["cpu_adam4bit", "cpu_adam32bit"])
@pytest.mark.parametrize("offload", ["cpu", "0.5"])
def test_streamed_is_unstreamed(tiny, tmp_path, optim, changes, offload) -> None:
    optim_args = "master_bits=32" if optim == "cpu_adam32bit" else ""
    whole = fit(tiny, tmp_path, "none", optim=optim, optim_args=optim_args, **changes)
    streamed = fit(tiny, tmp_path, offload, optim=optim, optim_args=optim_args, **changes)
    assert streamer_of(whole.model) is None
    assert len(streamer_of(streamed.model).blocks) == (4 if offload == "cpu" else 2)
    assert_same(tiny, whole, streamed)


@pytest.fixture
def travelling(monkeypatch):
    """Updates that the "device" does where it needs a block before the CPU has come to it, as a GPU does."""
    monkeypatch.setattr(trainers, "overlap", functools.partial(overlap, travels=True))
    step = native.adam_step

    def slow(tensors, threads=None, ending=None):
        if threading.current_thread().name.startswith("hf_lowmem_late"):
            time.sleep(0.005)
        return step(tensors, threads, ending)

    monkeypatch.setattr(native, "adam_step", slow)
    updates, update = [], HostLink.update
    monkeypatch.setattr(HostLink, "update", lambda self, part: (updates.append(1), update(self, part))[1])
    return updates


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 3}, {"max_grad_norm": 0.0}, {"dtype": "bfloat16", "max_grad_norm": 0.01}],
    ids=["plain", "accumulated", "unclipped", "bf16"],
)
def test_updates_that_travel(tiny, tmp_path, changes, travelling) -> None:
    """Also saved, resumed, evaluated, and the best model loaded."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    settings |= {"optim": "cpu_adam4bit", "load_best_model_at_end": True, "trainer": {"eval_dataset": tiny.data(8)}}
    settings |= changes
    runs = [fit(tiny, tmp_path / offload, offload, layers=6, **settings) for offload in ("none", "cpu")]
    assert_same(tiny, *runs)
    assert bool(travelling) == (settings.get("max_grad_norm") != 0)
    model = tiny.model(num_hidden_layers=6, dtype=changes.get("dtype", "float32"))
    settings.pop("dtype", None)
    resumed = fit(tiny, tmp_path / "cpu", "cpu", model=model, resume=str(tmp_path / "cpu" / "checkpoint-4"), **settings)
    assert tiny.equal_bits(tiny.weights(resumed.model), tiny.weights(runs[1].model))


def test_evaluated_saved_and_best_loaded(tiny, tmp_path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    settings |= {"optim": "cpu_adam4bit", "load_best_model_at_end": True, "trainer": {"eval_dataset": tiny.data(8)}}
    runs = [fit(tiny, tmp_path / offload, offload, **settings) for offload in ("none", "cpu")]
    assert_same(tiny, *runs)
    loaded = type(runs[0].model).from_pretrained(tmp_path / "cpu" / "checkpoint-6")
    whole = type(runs[0].model).from_pretrained(tmp_path / "none" / "checkpoint-6")
    assert tiny.equal_bits(tiny.weights(loaded), tiny.weights(whole))


@pytest.mark.parametrize(("first", "second"), [("cpu", "cpu"), ("none", "cpu"), ("cpu", "none"), ("0.5", "cpu")])
def test_resumed_is_never_stopped(tiny, tmp_path, first, second) -> None:
    """Also where the blocks rest somewhere else after it."""
    settings = {"optim": "cpu_adam4bit", "dtype": "bfloat16", "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    straight = fit(tiny, tmp_path, first, **settings)
    resumed = fit(tiny, tmp_path, second, resume=str(tmp_path / "checkpoint-3"), **settings)
    assert tiny.equal_bits(tiny.weights(straight.model), tiny.weights(resumed.model))


class Stop(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_interrupted_training_leaves_the_model_at_home(tiny, tmp_path) -> None:
    model = tiny.model(num_hidden_layers=4)
    with pytest.raises(KeyboardInterrupt):
        fit(tiny, tmp_path, "cpu", model=model, optim="cpu_adam4bit", trainer={"callbacks": [Stop()]})
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit", max_steps=2, lr_scheduler_type="constant")
    streamed = fit(tiny, tmp_path, "cpu", optim="cpu_adam4bit", max_steps=2, lr_scheduler_type="constant")
    assert_same(tiny, whole, streamed)
    streamer = streamer_of(model)
    assert not streamer._there
    assert all(p.isfinite().all() for p in model.parameters())
    model.eval().generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=2)


def test_lora(tiny, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    runs = []
    for offload in ("none", "cpu"):
        torch.manual_seed(3)
        model = get_peft_model(tiny.model(num_hidden_layers=4), LoraConfig(r=1, target_modules="all-linear"))
        runs.append(fit(tiny, tmp_path, offload, model=model, optim="cpu_adam4bit"))
    assert_same(tiny, *runs)
    streamed = streamer_of(runs[1].model)
    assert not any(p.requires_grad for block in streamed.blocks for _, p in block.params)


def test_stock_trainer_trains_an_attached_model(tiny, tmp_path) -> None:
    """The blocks are ordinary CPU parameters to it, whatever the optimizer."""
    from transformers import Trainer

    from hf_lowmem import LowMemConfig, attach

    runs = []
    for offload in ("none", "cpu"):
        model = tiny.model(num_hidden_layers=4)
        attach(model, LowMemConfig(offload=offload))
        runs.append(tiny.fit(Trainer, tmp_path, model=model, optim="adamw_torch", gradient_accumulation_steps=2))
    assert_same(tiny, *runs)


def test_the_stock_trainer_does_not_ignore_offload(tiny, tmp_path) -> None:
    from transformers import Trainer

    from hf_lowmem import LowMemConfig, attach, create_optimizer

    settings = {"optim": "cpu_adam4bit", "optim_args": "offload=cpu"}
    with pytest.raises(ValueError, match=r'offload="cpu" streams a model.s blocks.*use LowMemTrainer'):
        tiny.fit(Trainer, tmp_path, **settings)
    with pytest.raises(ValueError, match=r"call attach\(model, config\) before"):
        create_optimizer(tiny.model(), LowMemConfig(offload=0.5))
    model = tiny.model()
    attach(model, LowMemConfig(offload="cpu"))
    assert tiny.equal_bits(
        tiny.weights(tiny.fit(Trainer, tmp_path, model=model, **settings).model),
        tiny.weights(tiny.fit(Trainer, tmp_path, optim="cpu_adam4bit").model),
    )


def test_a_model_attached_before_is_trained_alike(tiny, tmp_path) -> None:
    """By load or by hand; LowMemTrainer need not be told."""
    from hf_lowmem import LowMemConfig, attach
    from hf_lowmem.loss import chunked_causal_loss
    from hf_lowmem.overlap import SettleCallback

    model = tiny.model(num_hidden_layers=4)
    attach(model, LowMemConfig(offload="cpu"))
    changes = {"optim": "cpu_adam4bit", "bf16": True}
    runs = [fit(tiny, tmp_path, "none", **changes), fit(tiny, tmp_path, "none", model=model, **changes)]
    assert_same(tiny, *runs)
    assert any(isinstance(callback, SettleCallback) for callback in runs[1].callback_handler.callbacks)
    assert not any(isinstance(callback, SettleCallback) for callback in runs[0].callback_handler.callbacks)
    assert runs[1].accelerator.autocast_handler.cache_enabled is False
    assert model.loss_function is chunked_causal_loss


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_trainer_trains_twice(tiny, tmp_path, max_grad_norm) -> None:
    runs = []
    for offload in ("none", "cpu"):
        trainer = fit(tiny, tmp_path / offload, offload, optim="cpu_adam4bit", max_grad_norm=max_grad_norm)
        trainer.train()
        runs.append(trainer)
    assert_same(tiny, *runs)


def slow_updates(monkeypatch) -> None:
    step = native.adam_step

    def slow(tensors, threads=None, ending=None):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)
        return step(tensors, threads, ending)

    monkeypatch.setattr(native, "adam_step", slow)


@pytest.mark.parametrize(
    "event", ["on_optimizer_step", "on_step_begin", "on_log", "on_step_end", "on_pre_optimizer_step"]
)
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_callbacks_see_updated_weights(tiny, tmp_path, monkeypatch, event, max_grad_norm) -> None:
    slow_updates(monkeypatch)
    seen = []
    for offload in ("none", "cpu"):
        weights: list[torch.Tensor] = []

        def look(self, args, state, control, model=None, weights=weights, **kwargs):
            weights += [p.detach().clone() for p in model.parameters()]

        watcher = type("Watcher", (TrainerCallback,), {event: look})()
        fit(
            tiny, tmp_path, offload, optim="cpu_adam4bit", max_grad_norm=max_grad_norm, trainer={"callbacks": [watcher]}
        )
        seen.append(weights)
    assert seen[0]
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


class Penalised(LowMemTrainer):
    """Reads weights before the forward."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        penalty = sum(p.square().sum() for p in model.parameters())
        return super().compute_loss(model, inputs, *args, **kwargs) + 0.01 * penalty


class Twice(LowMemTrainer):
    """Two backwards a step."""

    def training_step(self, *args, **kwargs):
        super().training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("cls", [Penalised, Twice])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_trainers_of_ones_own(tiny, tmp_path, monkeypatch, cls, max_grad_norm) -> None:
    slow_updates(monkeypatch)
    runs = []
    for offload in ("none", "cpu"):
        model = tiny.model(num_hidden_layers=4)
        args = {"optim": "cpu_adam4bit", "optim_args": f"offload={offload}", "max_grad_norm": max_grad_norm}
        runs.append(tiny.fit(cls, tmp_path, model=model, **args))
    assert_same(tiny, *runs)


def test_gradients_changed_by_a_callback_count(tiny, tmp_path) -> None:
    class Sign(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for p in model.parameters():
                p.grad.sign_()

    runs = [
        fit(tiny, tmp_path, offload, optim="cpu_adam4bit", max_grad_norm=0.0, trainer={"callbacks": [Sign()]})
        for offload in ("none", "cpu")
    ]
    assert tiny.equal_bits(*(tiny.weights(run.model) for run in runs))


def test_torch_compile_is_refused(tiny, tmp_path) -> None:
    with pytest.raises(ValueError, match=r'offload="cpu" moves weights under a compiled model.*torch_compile=False'):
        fit(tiny, tmp_path, "cpu", optim="cpu_adam4bit", torch_compile=True)
