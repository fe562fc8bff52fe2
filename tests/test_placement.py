"""``offload="auto"``: the same training wherever blocks rest, and as many on the device as it has room for.

Without a GPU the "device" is host memory whose bytes are counted here; test_placement_gpu.py has the real one.
"""

from __future__ import annotations

import pytest
import torch
from counted_memory import auto
from test_streamed_trainer import assert_same, fit
from torch import nn
from transformers import TrainerCallback

from hf_lowmem import DoesNotFit, LowMemConfig, LowMemTrainer, attach, load
from hf_lowmem.again import largest
from hf_lowmem.attachment import streamed_blocks, streamer_of
from hf_lowmem.stream import Streamer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def block_cost(trainer) -> int:
    return trainer._placement._cost


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "max_grad_norm": 0.01},
        {"max_grad_norm": 0.0},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "optim": "cpu_adam32bit", "optim_args": "master_bits=32"},
    ],
    ids=["plain", "accumulated", "checkpointed", "unclipped", "bf16", "32 bits"],
)
def test_the_same_training_with_any_room(tiny, tmp_path, memory, changes, capsys) -> None:
    settings = {"optim": "cpu_adam4bit", "layers": 8, **changes}
    whole = fit(tiny, tmp_path, "none", **settings)
    kept = set()
    everything = auto(tiny, tmp_path, layers=8, **changes)
    cost, full = block_cost(everything), everything._placement.plan.gpu
    for missing in (0, 1, 2.5, 4):
        memory.limit = int(full + cost * (0.5 - missing))
        trainer = auto(tiny, tmp_path, layers=8, **changes)
        assert_same(tiny, whole, trainer)
        blocks = streamer_of(trainer.model).blocks
        kept.add(sum(block.kept for block in blocks))
        explicit = streamed_blocks(
            trainer.model, LowMemConfig(offload=trainer._placement.plan.offload).offload_share or 1
        )
        if trainer._placement.plan.streamed:
            assert [b.name for b in explicit] == [b.name for b in blocks if not b.kept]
        said = capsys.readouterr().out
        assert f'offload="{trainer._placement.plan.offload}"' in said
        streamed = trainer._placement.plan.streamed > 0
        assert ("more could stay" in said) == streamed
        assert ("with gradient_checkpointing=True" in said) == (streamed and "gradient_checkpointing" not in changes)
    assert len(kept) >= 3


def test_planned_is_what_a_step_takes(tiny, tmp_path, memory) -> None:
    """The largest of many samples of a placed step, against the plan."""
    everything = auto(tiny, tmp_path)
    full, cost = everything._placement.plan.gpu, block_cost(everything)
    for missing in (0.5, 1.5, 2.5):
        memory.limit = int(full - cost * missing)
        samples = []

        class Sampling(LowMemTrainer):
            def training_step(self, *args, samples=samples, **kwargs):
                placement, streamer = self._placement, streamer_of(self.model)
                if placement.plan is not None:
                    streamer.observer = lambda block, what: samples.append(memory.peak())
                loss = super().training_step(*args, **kwargs)
                if placement.plan is not None:
                    samples.append(memory.peak())
                return loss

        args = {"optim": "cpu_adam4bit", "optim_args": "offload=auto,gpu_memory=1GB"}
        trainer = tiny.fit(Sampling, tmp_path, model=tiny.model(num_hidden_layers=4), **args)
        plan = trainer._placement.plan
        assert plan.streamed in (1, 2, 3)
        assert 0.8 * plan.gpu <= max(samples) <= plan.gpu <= memory.limit
        streamed = [p for b in streamer_of(trainer.model).blocks if not b.kept for _, p in b.params]
        assert plan.in_ram.weights == sum(p.nbytes for p in streamed)


def test_a_step_that_went_through_is_not_refused(tiny, tmp_path, memory) -> None:
    """Although it has taken what was meant for the allocator."""
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit")
    auto(tiny, tmp_path)
    memory.limit, memory.activations = memory.taken() + 300_000, 10**6
    trainer = auto(tiny, tmp_path)
    assert trainer._placement.plan.gpu > memory.limit
    assert not any(block.kept for block in streamer_of(trainer.model).blocks)
    assert_same(tiny, whole, trainer)


def test_no_room_while_blocks_move(tiny, tmp_path, memory, monkeypatch, capsys) -> None:
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit")
    keep = Streamer.keep

    def keep_two(self, block):
        if sum(b.kept for b in self.blocks) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        keep(self, block)

    monkeypatch.setattr(Streamer, "keep", keep_two)
    trainer = auto(tiny, tmp_path)
    assert sum(block.kept for block in streamer_of(trainer.model).blocks) == 2
    assert "fewer stay than planned" in capsys.readouterr().out
    assert_same(tiny, whole, trainer)


class Inputs:
    """Counts the inputs of blocks that wait on the "device" for their backward."""

    def __init__(self, trainer: LowMemTrainer) -> None:
        self.trainer, self.waiting = trainer, 0
        for block in streamer_of(trainer.model).blocks:
            block.module.register_forward_hook(self.keep)
            block.module.register_full_backward_hook(self.drop)

    def keep(self, *args) -> None:
        if torch._C._current_graph_task_id() == -1 and self.trainer._inputs is None:
            self.waiting += 1

    def drop(self, *args) -> None:
        self.waiting = max(0, self.waiting - 1)


@pytest.mark.parametrize(("input_bytes", "offloads"), [(0, False), (10**5, True), (10**6, False)])
def test_inputs_wait_in_ram_where_that_pays(tiny, tmp_path, memory, capsys, input_bytes, offloads, monkeypatch) -> None:
    """Not where they are nothing, and not where they are more than what the blocks that could stay instead would move:
    one of 28,000 parameters moves 0.6 MB."""
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    settings |= {"max_steps": 5, "trainer": {"train_dataset": tiny.data(32)}}

    def run(offload, **more):
        model = tiny.model(num_hidden_layers=8, dtype="bfloat16")
        return tiny.fit(Counting, tmp_path, model=model, optim="cpu_adam4bit", optim_args=offload, **settings, **more)

    class Counting(LowMemTrainer):
        def _place(self, *args):
            super()._place(*args)
            self.inputs = Inputs(self)

    Counting.__module__ = "hf_lowmem.tests"
    taken = memory.taken
    monkeypatch.setattr(memory, "taken", lambda: taken() + input_bytes * memory.trainer.inputs.waiting)
    whole = run("offload=cpu")
    memory.limit = 10**9
    run("offload=auto,gpu_memory=1GB")
    memory.limit = memory.taken() + 8 * input_bytes - 4 * 10**5  # all blocks but a few
    trainer = run("offload=auto,gpu_memory=1GB")
    assert_same(tiny, whole, trainer)
    said = capsys.readouterr().out
    assert ("inputs of blocks wait in RAM" in said) == offloads
    assert (trainer._inputs is not None) == offloads
    assert trainer._placement.plan is not None
    for choice in ("true", "false"):  # whoever has chosen is not asked
        run(f"offload=auto,gpu_memory=1GB,offload_activations={choice}")
    assert "inputs of blocks wait in RAM" not in capsys.readouterr().out


def test_a_larger_batch_moves_blocks_back(tiny, tmp_path, memory, capsys) -> None:
    """Before its forward, by what the batches so far have taken."""
    small, large = tiny.data(8, length=16), tiny.data(8, length=64)
    data = [*small[:4], *large[:2], *small[4:8], *large[2:4]]
    settings = {"per_device_train_batch_size": 2, "max_steps": 6}
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit", trainer={"train_dataset": InOrder(data)}, **settings)
    auto(tiny, tmp_path, trainer={"train_dataset": InOrder(data)}, **settings)
    memory.activations = 1000
    memory.limit = memory.taken() + 1000 * 40 + 10**5
    trainer = auto(tiny, tmp_path, trainer={"train_dataset": InOrder(data)}, **settings)
    assert_same(tiny, whole, trainer)
    said = capsys.readouterr().out
    assert "a larger batch has come" in said
    assert trainer._placement.plan.streamed > 0


class OwnStep(LowMemTrainer):
    """Does not call ours."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_training_step_of_somebody_s_own(tiny, tmp_path, memory) -> None:
    settings = {"optim": "cpu_adam4bit", "gradient_checkpointing": True}
    runs = []
    for optim_args in ("offload=none", "offload=auto,gpu_memory=1GB,offload_activations=true"):
        model = tiny.model(num_hidden_layers=4)
        runs.append(tiny.fit(OwnStep, tmp_path, model=model, optim_args=optim_args, **settings))
    assert_same(tiny, *runs)
    assert all(block.kept for block in streamer_of(runs[1].model).blocks)
    assert runs[1]._inputs.nbytes > 0


def test_a_model_that_is_attached_otherwise_is_refused(tiny, tmp_path) -> None:
    model = tiny.model(num_hidden_layers=4)
    attach(model, LowMemConfig(offload="0.5"))
    for offload in ("none", "0.5"):  # as it is, or as it was
        fit(tiny, tmp_path, offload, model=model, optim="cpu_adam4bit")
    with pytest.raises(ValueError, match=r"with 2 streamed blocks and .*: call detach"):
        fit(tiny, tmp_path, "cpu", model=model, optim="cpu_adam4bit")


class Writes(TrainerCallback):
    """Writes a weight of every block between the gradients and the first update, where blocks move."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.up_proj.weight.mul_(1.01)


def test_a_weight_written_before_the_blocks_move(tiny, tmp_path, memory) -> None:
    settings = {"dtype": "bfloat16", "trainer": {"callbacks": [Writes()]}}
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit", save_strategy="steps", save_steps=2, **settings)
    runs = [auto(tiny, tmp_path, **settings)]
    # Moved in a later step, with masters that the callback has left behind.
    runs.append(auto(tiny, tmp_path, resume=str(tmp_path / "checkpoint-2"), **settings))
    for trainer in runs:
        assert tiny.equal_bits(tiny.weights(whole.model), tiny.weights(trainer.model))


def test_the_size_of_a_batch() -> None:
    """Whatever kind of mapping it comes in."""
    from transformers import BatchEncoding

    tensors = {"input_ids": torch.zeros(2, 5), "labels": torch.zeros(3)}
    for batch in (tensors, BatchEncoding(tensors)):
        assert largest((nn.Linear(2, 2), batch), {"num_items_in_batch": torch.tensor(4)}) == 10
    assert largest((), {}) == 0


class InOrder(torch.utils.data.IterableDataset):
    """Samples in the order given."""

    def __init__(self, samples) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def test_offloaded_activations_by_name(tiny, tmp_path) -> None:
    settings = {"optim": "cpu_adam4bit", "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    for offload in ("none", "cpu"):
        plain = fit(tiny, tmp_path, offload, **settings)
        moved = fit(tiny, tmp_path, offload, optim_args="offload_activations=true", **settings)
        assert_same(tiny, plain, moved)
        assert plain._inputs is None
        assert moved._inputs.nbytes > 0
        for trainer in (plain, moved):  # and once more
            trainer.train()
        assert_same(tiny, plain, moved)
    with pytest.raises(ValueError, match="write gradient_checkpointing=True"):
        fit(tiny, tmp_path, "cpu", optim="cpu_adam4bit", optim_args="offload_activations=true")


def test_resumed_and_trained_on(tiny, tmp_path, memory) -> None:
    everything = auto(tiny, tmp_path)
    memory.limit = int(everything._placement.plan.gpu - 1.5 * block_cost(everything))
    settings = {"dtype": "bfloat16", "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    straight = auto(tiny, tmp_path, **settings)
    resumed = auto(tiny, tmp_path, resume=str(tmp_path / "checkpoint-3"), **settings)
    assert tiny.equal_bits(tiny.weights(straight.model), tiny.weights(resumed.model))
    loaded = type(straight.model).from_pretrained(tmp_path / "checkpoint-6")
    assert tiny.equal_bits(tiny.weights(loaded), tiny.weights(straight.model))
    placement = resumed._placement
    resumed.train()
    assert resumed._placement is placement


def test_lora_keeps_frozen_blocks(tiny, tmp_path, memory) -> None:
    from peft import LoraConfig, get_peft_model

    runs = []
    for offload in ("none", "auto"):
        torch.manual_seed(3)
        model = get_peft_model(tiny.model(num_hidden_layers=8), LoraConfig(r=1, target_modules="all-linear"))
        memory.limit = 900_000
        runs.append(fit(tiny, tmp_path, offload, model=model, optim="cpu_adam4bit", optim_args="gpu_memory=1GB"))
    assert_same(tiny, *runs)
    assert 0 < sum(block.kept for block in streamer_of(runs[1].model).blocks) < 8


def test_nothing_to_save_without_a_gpu(tiny, tmp_path) -> None:
    trainer = fit(tiny, tmp_path, "auto", optim="cpu_adam4bit")
    assert streamer_of(trainer.model) is None
    assert attach(tiny.model(), LowMemConfig(offload="auto"), "cpu") is None


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ({"gpu_memory": "100kB"}, r"needs 0\.\d MB of GPU memory.*\n.*GPU"),
        ({"cpu_memory": "100kB"}, r"needs 0\.\d MB of RAM.*dtype=.bfloat16. saves"),
    ],
)
def test_weights_that_fit_nowhere(tiny, tmp_path, budgets, message) -> None:
    """Said before a tensor has been moved or read."""
    config = {"num_hidden_layers": 4, "vocab_size": 128}
    model = tiny.model(**config)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(DoesNotFit, match=message):
        attach(model, LowMemConfig(offload="cpu", **budgets))
    assert [p.data_ptr() for p in model.parameters()] == before
    model.save_pretrained(tmp_path)
    with pytest.raises(DoesNotFit, match=message):
        load(tmp_path, LowMemConfig(offload="cpu", **budgets), "cpu")


@pytest.mark.parametrize(
    ("offload", "budgets", "message"),
    [
        ("cpu", "cpu_memory=1500kB", r"needs \d\.\d MB of RAM"),
        ("auto", "gpu_memory=1GB,cpu_memory=1500kB", "MB of (RAM|GPU memory), and"),
        ("0.5", "gpu_memory=1500kB", "MB of GPU memory"),
    ],
)
def test_training_that_fits_nowhere(tiny, tmp_path, offload, budgets, message, memory) -> None:
    """Weights would fit, but not with masters, states and gradients: said before the first step."""
    memory.limit = 800_000 if offload == "auto" else 1_500_000
    model = tiny.model(num_hidden_layers=8, dtype="bfloat16", vocab_size=512)
    before = tiny.weights(model)
    with pytest.raises(DoesNotFit, match=message):
        fit(tiny, tmp_path, offload, model=model, optim="cpu_adam4bit", optim_args=budgets)
    assert tiny.equal_bits(before, tiny.weights(model))


@pytest.mark.parametrize(
    ("setting", "hint"),
    [("weights=int8", True), ("weights=int4", False), ("weights=int8,master_bits=8", False), ("", False)],
)
def test_what_8_bits_alone_would_save_is_said(tiny, tmp_path, memory, setting, hint) -> None:
    model = tiny.model(num_hidden_layers=4, dtype="bfloat16")
    weights = sum(p.nbytes for p in model.parameters())
    optim_args = ",".join(filter(None, [setting, f"cpu_memory={int(1.6 * weights)}B"]))
    with pytest.raises(DoesNotFit) as error:
        fit(tiny, tmp_path, "cpu", optim_args=optim_args, model=model, optim="cpu_adam4bit")
    assert ("master_bits=8 saves" in str(error.value)) == hint
