"""The loss that is logged where some are not finite: the stock Trainer's, but nobody waits for the device to know."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_lowmem import LowMemTrainer


class NotFinite:
    """Adds a constant to the losses of some calls, which leaves their gradients as they are."""

    def __init__(self, model, calls, value) -> None:
        self.count, self.calls, self.value = 0, calls, value
        model.register_forward_hook(self.after)

    def after(self, model, args, output):
        self.count += 1
        if model.training and self.count in self.calls:
            output["loss"] = output["loss"] + self.value
        return output


def losses(tiny, tmp_path, cls, value, **changes):
    model = tiny.model()
    NotFinite(model, {1, 4, 5, 8}, value)
    trainer = tiny.fit(cls, tmp_path, model, optim="cpu_adam32bit", max_grad_norm=0.0, max_steps=6, **changes)
    assert trainer.args.logging_nan_inf_filter is changes.get("logging_nan_inf_filter", True)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logging_steps": 3},
        {"logging_steps": 2, "gradient_accumulation_steps": 2},
        {"logging_nan_inf_filter": False},
    ],
)
def test_the_same_losses_are_logged_as_by_the_stock_trainer(tiny, tmp_path, value, changes) -> None:
    ours = losses(tiny, tmp_path, LowMemTrainer, value, **changes)
    theirs = losses(tiny, tmp_path, Trainer, value, **changes)
    assert len(ours) == len(theirs)
    assert all(a == b or (a != a and b != b) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert torch.tensor(ours, dtype=torch.float64).isfinite().all() == ("logging_nan_inf_filter" not in changes)


def test_nobody_asks_whether_the_loss_is_finite(tiny, tmp_path, monkeypatch) -> None:
    """On a GPU the answer would take the whole backward."""
    asked = []
    isnan = torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda x: asked.append(x.shape) or isnan(x))
    tiny.fit(LowMemTrainer, tmp_path, optim="cpu_adam4bit")
    assert torch.Size([]) not in asked
    tiny.fit(Trainer, tmp_path, optim="cpu_adam4bit")
    assert torch.Size([]) in asked  # or else this test would see nothing


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(args.logging_nan_inf_filter)

    on_pre_optimizer_step = on_substep_end = on_step_begin = on_log = on_save = on_step_end


def test_the_setting_stays_what_it_was(tiny, tmp_path) -> None:
    """Callbacks, checkpoints and a training that breaks off see the user's own."""
    watch = Watch()
    changes = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "optim": "cpu_adam4bit"}
    trainer = tiny.fit(LowMemTrainer, tmp_path, trainer={"callbacks": [watch]}, **changes)
    assert set(watch.seen) == {True}
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter is True

    class Breaks(LowMemTrainer):
        def floating_point_ops(self, inputs):
            raise KeyboardInterrupt

    made = Breaks(model=tiny.model(), args=tiny.args(tmp_path, optim="cpu_adam4bit"), train_dataset=tiny.data())
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.args.logging_nan_inf_filter is True
    # Outside of a training the loss is what it is.
    NotFinite(trainer.model, {1}, float("nan"))
    inputs = {key: value[None] for key, value in tiny.data()[0].items()}
    assert trainer.training_step(trainer.model, inputs).isnan()


def test_somebodys_own_count_of_operations(tiny, tmp_path) -> None:
    """It may not call ours, which puts the setting back."""

    class Own(LowMemTrainer):
        def floating_point_ops(self, inputs):
            return 0

    watch = Watch()
    trainer = tiny.fit(Own, tmp_path, trainer={"callbacks": [watch]}, optim="cpu_adam4bit", save_steps=2)
    assert set(watch.seen) == {True}
    assert trainer.args.logging_nan_inf_filter is True


def test_somebodys_own_step_keeps_the_stock_filter(tiny, tmp_path, monkeypatch) -> None:
    """What it makes of the loss is filtered too."""

    class Own(LowMemTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs) * float("nan")

    trainer = tiny.fit(Own, tmp_path, optim="cpu_adam4bit")
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [0.0] * 4
    assert trainer.args.logging_nan_inf_filter is True
