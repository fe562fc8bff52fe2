"""LowMemTrainer against the stock Trainer: the same weights, the same log; NaN gradients; what is refused."""

from __future__ import annotations

import copy
import os
import re

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_lowmem import LowBitAdamW, LowMemConfig, LowMemTrainer

# Ours and torch's AdamW differ in where a product or root is rounded, 2 or 3 units in the last place of one update; the
# difference goes through the gradients of the following steps. Measured in these runs: up to 19.5 ulps of the tensor's
# largest weight, 1e-7 of the gradient norm, 5e-7 of the tensor's largest moment.
WEIGHT_ULPS = 64
NORM_TOLERANCE = 1e-6
MOMENT_TOLERANCE = 1e-5


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_close(stock, ours):
    torch.testing.assert_close(logged(ours, "grad_norm"), logged(stock, "grad_norm"), rtol=NORM_TOLERANCE, atol=0)
    torch.testing.assert_close(logged(ours, "loss"), logged(stock, "loss"), rtol=NORM_TOLERANCE, atol=0)
    assert logged(ours, "learning_rate") == logged(stock, "learning_rate")
    for (name, wanted), got in zip(stock.model.named_parameters(), ours.model.parameters(), strict=True):
        ulp = wanted.abs().max().item() * torch.finfo(wanted.dtype).eps
        assert (got - wanted).abs().max().item() <= WEIGHT_ULPS * ulp, name
        # AdamW's weights hardly depend on a constant factor of the gradients, the clipping's say; its moments do.
        moments, our_moments = stock.optimizer.optimizer.state[wanted], ours.optimizer.optimizer.state[got]
        for key, our_key in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            difference = moments[key].flatten() - our_moments[our_key]
            assert difference.abs().max() <= MOMENT_TOLERANCE * moments[key].abs().max(), (name, key)


def both(tiny, folder, **changes):
    stock = tiny.fit(Trainer, folder / "stock", optim="adamw_torch", **changes)
    ours = tiny.fit(LowMemTrainer, folder / "ours", optim="cpu_adam32bit", optim_args="master_bits=32", **changes)
    return stock, ours


# -- against the stock Trainer with adamw_torch -----------------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 3, "max_steps": -1, "num_train_epochs": 1},
        {"max_grad_norm": 0.1},
        {"max_grad_norm": 0.0},
        {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 6},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 6},
        {"weight_decay": 0.3},
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        {"bf16": True},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_equals_the_stock_trainer(tiny, tmp_path, changes):
    stock, ours = both(tiny, tmp_path, **changes)
    assert_close(stock, ours)
    moved = (dict(ours.model.named_parameters())["lm_head.weight"] - tiny.weights(tiny.model())["lm_head.weight"]).abs()
    assert moved.max() > 1e-4


class Generate(TrainerCallback):
    def __init__(self):
        self.tokens = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        prompt = torch.arange(3, 9)[None]
        training = model.training
        self.tokens.append(model.eval().generate(prompt, max_new_tokens=4, do_sample=False).tolist())
        model.train(training)


def test_evaluation_and_generation_in_the_middle(tiny, tmp_path):
    runs = []
    for folder, cls, optim in (("stock", Trainer, "adamw_torch"), ("ours", LowMemTrainer, "cpu_adam32bit")):
        seen = Generate()
        trainer = tiny.fit(
            cls,
            tmp_path / folder,
            trainer={"callbacks": [seen], "eval_dataset": tiny.data(4)},
            optim=optim,
            eval_strategy="steps",
            eval_steps=2,
        )
        runs.append((trainer, seen.tokens))
    (stock, stock_tokens), (ours, our_tokens) = runs
    assert_close(stock, ours)
    assert our_tokens == stock_tokens
    torch.testing.assert_close(logged(ours, "eval_loss"), logged(stock, "eval_loss"), rtol=NORM_TOLERANCE, atol=0)


def test_best_model_and_save_total_limit(tiny, tmp_path):
    changes = {
        "trainer": {"eval_dataset": tiny.data(4)},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the first one wins, so that the best is not the last
        "max_steps": 6,
    }
    stock, ours = both(tiny, tmp_path, **changes)
    assert_close(stock, ours)
    assert os.path.basename(ours.state.best_model_checkpoint) == os.path.basename(stock.state.best_model_checkpoint)
    files = [
        {os.path.relpath(os.path.join(at, name), run) for at, _, names in os.walk(run) for name in names}
        for run in (tmp_path / "stock", tmp_path / "ours")
    ]
    assert files[0] == files[1]
    assert len({name.split(os.sep)[0] for name in files[0]}) < 3


@pytest.mark.parametrize("strategy", ["no", "epoch", "steps", "best"])
def test_save_strategies(tiny, tmp_path, strategy):
    changes = {
        "save_strategy": strategy,
        "save_steps": 3,
        "max_steps": -1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "eval_strategy": "epoch" if strategy == "best" else "no",
        "metric_for_best_model": "eval_loss" if strategy == "best" else None,
        "trainer": {"eval_dataset": tiny.data(4)},
    }
    both(tiny, tmp_path, **changes)
    stock, ours = (sorted(x for x in os.listdir(tmp_path / run) if x.startswith("ch")) for run in ("stock", "ours"))
    assert ours == stock


def test_gradients_are_measured_and_not_touched(tiny, tmp_path):
    class Norms(TrainerCallback):
        def __init__(self):
            self.norms = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    seen = Norms()
    trainer = tiny.fit(LowMemTrainer, tmp_path, trainer={"callbacks": [seen]}, optim="cpu_adam4bit", max_grad_norm=1e-3)
    assert seen.norms == logged(trainer, "grad_norm")
    assert min(seen.norms) > 0.1


def test_clipping_equals_stock_clipping_at_four_bits(tiny, tmp_path):
    """The stock Trainer multiplies the gradients, ours hands the factor on: a code may round the other way, no more."""
    runs = [tiny.fit(cls, tmp_path, optim="cpu_adam4bit", max_grad_norm=0.1) for cls in (Trainer, LowMemTrainer)]
    assert logged(runs[0], "grad_norm")[0] == logged(runs[1], "grad_norm")[0]
    start, one, other = (tiny.weights(model) for model in (tiny.model(), runs[0].model, runs[1].model))
    for name in start:
        moved = (one[name] - start[name]).norm()
        assert (one[name] - other[name]).norm() < 0.01 * moved, name


# -- which settings are in force --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lowmem", "changes", "wanted"),
    [
        (None, {}, LowMemConfig()),
        ({"state_bits": 8}, {}, LowMemConfig(state_bits=8)),
        (LowMemConfig(threads=1), {"optim": "cpu_adam8bit"}, LowMemConfig(state_bits=8, threads=1)),
        ({"seed": 2}, {"optim": "cpu_adam32bit", "optim_args": "threads=1"}, LowMemConfig(32, threads=1, seed=2)),
        (LowMemConfig(master_bits=16), {"optim_args": "seed=9"}, LowMemConfig(master_bits=16, seed=9)),
    ],
)
def test_settings(tiny, tmp_path, lowmem, changes, wanted):
    trainer = tiny.fit(LowMemTrainer, tmp_path, trainer={"lowmem": lowmem}, max_steps=1, **changes)
    assert trainer.lowmem == wanted
    optimizer = trainer.optimizer.optimizer
    group = optimizer.param_groups[0]
    assert (group["state_bits"], group["master_bits"]) == (wanted.state_bits, wanted.master_bits)
    seed = trainer.args.seed if wanted.seed is None else wanted.seed
    assert (optimizer.seed, optimizer.threads) == (seed, wanted.threads)


def test_bf16_model_and_model_init(tiny, tmp_path):
    args = tiny.args(tmp_path)
    trainer = LowMemTrainer(model_init=lambda: tiny.model(dtype="bfloat16"), args=args, train_dataset=tiny.data())
    trainer.train()
    first = tiny.weights(trainer.model)
    assert trainer.optimizer.optimizer.nbytes()["master"] == sum(p.numel() for p in trainer.model.parameters())
    trainer.train()
    assert tiny.equal_bits(first, tiny.weights(trainer.model))


@pytest.mark.parametrize(
    ("trainer", "changes", "message"),
    [
        ({"lowmem": {"state_bits": 8}}, {"optim": "cpu_adam4bit"}, 'write optim="cpu_adam8bit"'),
        ({"lowmem": {"state_bits": 3}}, {}, "state_bits=3 is not a width that exists"),
        ({"lowmem": {"bits": 8}}, {}, "'bits' is not a field of LowMemConfig"),
        ({}, {"optim": "cpu_adam4bit", "optim_args": "thread=2"}, "did you mean threads?"),
        ({}, {"optim": "adafactor"}, 'write optim="cpu_adam4bit" or leave optim out'),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})}, {}, "was handed SGD"),
    ],
)
def test_refused_before_the_trainer_is_made(tiny, tmp_path, trainer, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LowMemTrainer(tiny.model(), tiny.args(tmp_path, **changes), **trainer)


def test_handed_optimizer(tiny, tmp_path):
    model = tiny.model()
    with pytest.raises(ValueError, match="was handed AdamW: leave optimizers"):
        LowMemTrainer(model, tiny.args(tmp_path), optimizers=(torch.optim.AdamW(model.parameters()), None))
    ours = LowBitAdamW(model.parameters(), lr=1e-3)
    assert tiny.fit(LowMemTrainer, tmp_path, model, trainer={"optimizers": (ours, None)}).optimizer.optimizer is ours


@pytest.mark.parametrize("cls", [Trainer, LowMemTrainer])
class TestRefusedBeforeTraining:
    def refused(self, tiny, tmp_path, cls, model, message, **changes):
        before = tiny.weights(model)
        with pytest.raises(ValueError, match=message):
            tiny.fit(cls, tmp_path, model, **{"optim": "cpu_adam4bit", **changes})
        assert tiny.equal_bits(before, tiny.weights(model))

    def test_nothing_trainable(self, tiny, tmp_path, cls):
        model = tiny.model().requires_grad_(False)
        self.refused(tiny, tmp_path, cls, model, "LlamaForCausalLM has no trainable parameter: all 21 of its")

    def test_sparse_gradients(self, tiny, tmp_path, cls):
        model = tiny.model()
        model.model.embed_tokens.sparse = True
        self.refused(
            tiny, tmp_path, cls, model, r"LlamaForCausalLM.model.embed_tokens is an Embedding with sparse=True"
        )
        model.model.embed_tokens.weight.requires_grad_(False)
        tiny.fit(cls, tmp_path, model, optim="cpu_adam4bit", max_steps=1)

    def test_negative_learning_rate(self, tiny, tmp_path, cls):
        self.refused(tiny, tmp_path, cls, tiny.model(), r"lr is -0\.1", learning_rate=-0.1)

    @pytest.mark.parametrize("backend", ["DeepSpeed", "FSDP"])
    def test_other_backends(self, tiny, tmp_path, cls, backend):
        trainer = cls(tiny.model(), tiny.args(tmp_path, optim="cpu_adam4bit"), train_dataset=tiny.data())
        setattr(trainer, f"is_{backend.lower()}_enabled", True)
        with pytest.raises(ValueError, match=f"{backend} is on and brings its own"):
            trainer.train()


# -- gradients that are not finite ------------------------------------------------------------------------------
class Poison(TrainerCallback):
    """Puts one bad value into the gradient in some steps, and compares the run before and after each step."""

    def __init__(self, steps, value, micro_batches=1):
        self.steps, self.value, self.micro_batches = steps, value, micro_batches
        self.calls, self.changed = 0, []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.lm_head.weight.register_hook(self.poison)

    def poison(self, gradient):
        step, micro_batch = divmod(self.calls, self.micro_batches)
        self.calls += 1
        if step in self.steps and micro_batch == 0:
            gradient = gradient.clone()
            gradient[5, 7] = self.value
        return gradient

    def snapshot(self, model, optimizer):
        moments = {
            f"{number}.{key}": value
            for number, entries in optimizer.state_dict()["state"].items()
            for key, value in entries.items()
            if key != "step" and isinstance(value, torch.Tensor)
        }
        return copy.deepcopy({**dict(model.state_dict()), **moments})

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.before = self.snapshot(model, optimizer)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        after = self.snapshot(model, optimizer)
        same = after.keys() == self.before.keys()
        self.changed.append(not (same and all(torch.equal(after[key], self.before[key]) for key in after)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("cls", [Trainer, LowMemTrainer])
def test_a_bad_gradient_skips_the_step(tiny, tmp_path, cls, value):
    poison = Poison({2, 3}, value, micro_batches=2)
    changes = {"optim": "cpu_adam4bit", "max_steps": 6, "gradient_accumulation_steps": 2}
    trainer = tiny.fit(cls, tmp_path, trainer={"callbacks": [poison]}, **changes)
    assert poison.changed == [True, True, False, False, True, True]
    optimizer = trainer.optimizer.optimizer
    assert (optimizer.skipped_steps, optimizer.skipped_in_a_row, optimizer.skipped_blocks) == (2, 0, 0)
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry.get("skipped_steps") for entry in losses] == [None, None, 1, 2, 2, 2]
    assert trainer.state.log_history[-1]["skipped_steps"] == 2
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    finite = torch.tensor(logged(trainer, "grad_norm")).isfinite().tolist()
    assert finite == [True, True, False, False, True, True]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("cls", [Trainer, LowMemTrainer])
def test_too_many_in_a_row_end_the_training(tiny, tmp_path, cls, max_grad_norm):
    model = tiny.model()
    poison = Poison({1, 3, 4, 5, 6}, float("nan"))
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        tiny.fit(
            cls,
            tmp_path,
            model,
            trainer={"callbacks": [poison]},
            optim="cpu_adam4bit",
            optim_args="max_skipped_steps=3",
            max_steps=8,
            max_grad_norm=max_grad_norm,
        )
    assert poison.calls == 6
    assert all(p.isfinite().all() for p in model.parameters())


def test_what_reports_sees_the_count(tiny, tmp_path):
    """A reporting integration is a callback: it must find the count in the logs that it is handed."""

    class Report(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(logs.get("skipped_steps"))

    for cls in (Trainer, LowMemTrainer):
        report = Report()
        tiny.fit(cls, tmp_path, trainer={"callbacks": [Poison({1}, float("nan")), report]}, optim="cpu_adam4bit")
        assert report.seen == [None, 1, 1, 1, 1]


def test_a_gradient_scaler_skips_by_itself(tiny, tmp_path):
    """fp16 on a GPU: Accelerate's wrapper holds a GradScaler. It has none on the CPU, so this one is put in."""

    class Scaled(LowMemTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
            self.accelerator.scaler = scaler
            self.accelerator.backward = lambda loss, **kwargs: scaler.scale(loss).backward()
            self.accelerator.unscale_gradients = lambda: scaler.unscale_(self.optimizer.optimizer)

    poison = Poison({1}, float("inf"))
    scaled = tiny.fit(Scaled, tmp_path, trainer={"callbacks": [poison]}, optim="cpu_adam4bit", max_grad_norm=0.5)
    assert poison.changed == [True, False, True, True]
    assert scaled.accelerator.scaler.get_scale() == 2.0**9
    optimizer = scaled.optimizer.optimizer
    assert optimizer.skipped_steps == 0
    plain = tiny.fit(
        LowMemTrainer, tmp_path, trainer={"callbacks": [Poison({}, 0)]}, optim="cpu_adam4bit", max_grad_norm=0.5
    )
    assert logged(scaled, "grad_norm")[0] == logged(plain, "grad_norm")[0]  # a power of two scales exactly


def test_a_norm_that_fp16_cannot_hold_skips_nothing(tiny, tmp_path):
    """Finite gradients whose norm is over 65,504: torch's norm of fp16 gradients is infinite then."""
    model = tiny.model(dtype="float16")
    trainer = LowMemTrainer(model=model, args=tiny.args(tmp_path), train_dataset=tiny.data())
    optimizer = trainer.create_optimizer()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1000.0)
    norm = trainer._measure_gradients(model, 1.0)
    count = sum(p.numel() for p in model.parameters())
    assert norm.item() == pytest.approx(1000.0 * count**0.5, rel=1e-6)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert all(p.isfinite().all() for p in model.parameters())
