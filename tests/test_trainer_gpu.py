"""The Trainer with the model on a GPU and the states in RAM. All of it needs a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_lowmem import LowMemTrainer
from hf_lowmem.optim import LowBitAdamW

pytestmark = pytest.mark.gpu
EXACT = {"optim": "cpu_adam32bit", "optim_args": "master_bits=32"}
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, for the fixture below


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def fit(tiny, cls, folder, **changes):
    """A run with all of it on the GPU."""
    return tiny.fit(cls, folder, use_cpu=False, **changes)


# With so large an epsilon an update is nearly in proportion to the gradient: a wrong scale of it shows, and the last
# bit of a gradient near zero does not decide a whole update, as it does in AdamW's first steps otherwise.
LINEAR = {"adam_epsilon": 1.0, "learning_rate": 0.5}


def assert_near(tiny, ours, theirs) -> None:
    """That two runs went the same way: on the CPU ours is the stock one bit for bit, a GPU's AdamW rounds elsewhere."""
    start = tiny.weights(tiny.model().to("cuda"))
    for name, weight in tiny.weights(theirs.model).items():
        way = (weight - start[name]).norm()
        assert way > 0
        assert (tiny.weights(ours.model)[name] - weight).norm() <= 1e-3 * way, name


@pytest.mark.parametrize("cls", [Trainer, LowMemTrainer])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": True, "gradient_accumulation_steps": 2},
        {"fp16": True},
        {"max_grad_norm": 0.01, "weight_decay": 0.1, "lr_scheduler_type": "cosine"},
    ],
    ids=["fp32", "bf16", "fp16", "clipped"],
)
def test_equals_the_stock_trainer(tiny, tmp_path, cls, changes):
    stock = fit(tiny, Trainer, tmp_path / "a", optim="adamw_torch", max_steps=6, **LINEAR, **changes)
    ours = fit(tiny, cls, tmp_path / "b", max_steps=6, **EXACT, **LINEAR, **changes)
    assert next(ours.model.parameters()).device.type == "cuda"
    assert_near(tiny, ours, stock)
    norms = [[log["grad_norm"] for log in t.state.log_history if "grad_norm" in log] for t in (ours, stock)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


class Overflow(TrainerCallback):
    """Makes one gradient infinite before the given steps, as an overflow of fp16 does."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.handle = None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.steps:
            weight = model.model.layers[0].mlp.up_proj.weight
            self.handle = weight.register_hook(lambda grad: grad * float("inf"))

    def on_step_end(self, args, state, control, **kwargs):
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


@pytest.mark.parametrize("cls", [Trainer, LowMemTrainer])
def test_fp16_overflow_is_skipped_by_the_scaler(tiny, tmp_path, cls):
    runs = {}
    for name, trainer_class, optim in (("stock", Trainer, {"optim": "adamw_torch"}), ("ours", cls, EXACT)):
        given = {"callbacks": [Overflow(1, 3)]}
        runs[name] = fit(tiny, trainer_class, tmp_path / name, trainer=given, fp16=True, max_steps=6, **LINEAR, **optim)
    assert_near(tiny, runs["ours"], runs["stock"])
    scales = [run.accelerator.scaler.get_scale() for run in runs.values()]
    assert scales[0] == scales[1] < 65536.0
    optimizer = runs["ours"].optimizer.optimizer
    assert isinstance(optimizer, LowBitAdamW)
    assert {state["step"] for state in optimizer.state.values()} == {4}
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("cls", [Trainer, LowMemTrainer])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_bf16_overflow_is_skipped_and_counted(tiny, tmp_path, cls, max_grad_norm):
    given = {"callbacks": [Overflow(1)]}
    model = tiny.model(dtype="bfloat16")
    run = fit(tiny, cls, tmp_path, model=model, trainer=given, optim="cpu_adam4bit", max_grad_norm=max_grad_norm)
    optimizer = run.optimizer.optimizer
    assert optimizer.skipped_steps == 1
    assert {state["step"] for state in optimizer.state.values()} == {3}
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert run.state.log_history[-1]["skipped_steps"] == 1


@pytest.mark.parametrize("cls", [Trainer, LowMemTrainer])
def test_resumed_is_never_stopped(tiny, tmp_path, cls):
    settings = {"optim": "cpu_adam4bit", "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        model = tiny.model(dtype="bfloat16", attention_dropout=0.2)
        runs.append(fit(tiny, cls, tmp_path, model=model, resume=resume, **settings))
    assert tiny.equal_bits(*(tiny.weights(run.model) for run in runs))
