"""``offload="auto"``: the same training wherever blocks rest, and as many on the device as it has room for.

Without a GPU the "device" is host memory whose bytes are counted here; test_placement_gpu.py has the real one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_streamed_trainer import assert_same, fit
from torch import nn
from transformers import TrainerCallback

from hf_lowmem import DoesNotFit, LowMemConfig, LowMemTrainer, attach, load
from hf_lowmem import trainer as doors
from hf_lowmem.attachment import streamed_blocks, streamer_of
from hf_lowmem.placement import Placement
from hf_lowmem.stream import Streamer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@dataclass
class CountedMemory:
    """Bytes of a model that are on the "device": what is not at home, with gradients, and activations by batch.

    Args:
        limit: bytes.
        activations: bytes for each value of a batch.
    """

    limit: int
    activations: int = 0
    trainer: LowMemTrainer | None = None
    values: int = 0
    hint: str = "more could stay"

    def taken(self) -> int:
        streamer = streamer_of(self.trainer.model)
        home = {p for block in streamer.blocks if not block.kept for _, p in block.params}
        there = [p for p in self.trainer.model.parameters() if p not in home]
        optimizer = self.trainer.optimizer
        states = [optimizer.state[p] for p in there if p in getattr(optimizer, "state", {})]
        held = sum(x.nbytes for state in states for x in state.values() if isinstance(x, torch.Tensor))
        return held + sum(p.nbytes + (p.nbytes if p.grad is not None else 0) for p in there)

    def peak(self) -> int:
        return self.taken() + streamer_of(self.trainer.model).passing_bytes + self.activations * self.values

    def held(self) -> str:
        return f"{self.peak()} bytes"

    def retries(self) -> int:
        return 0

    def tidy(self) -> None: ...


@pytest.fixture
def memory(monkeypatch):
    """Lets Trainers on the CPU count memory; `memory.limit` and the like may be set."""
    counted = CountedMemory(10**12)
    monkeypatch.setattr(doors, "memory_of", lambda device, budget: counted)
    original = LowMemTrainer._place
    before = Placement.before_forward

    def place(self, *args):
        counted.trainer = self
        original(self, *args)

    def before_forward(self, size):
        counted.values = size
        before(self, size)

    monkeypatch.setattr(LowMemTrainer, "_place", place)
    monkeypatch.setattr(Placement, "before_forward", before_forward)
    return counted


def auto(tiny, folder, **changes):
    optim_args = ",".join(filter(None, [changes.pop("optim_args", ""), "gpu_memory=1GB"]))
    return fit(tiny, folder, "auto", optim_args=optim_args, **{"optim": "cpu_adam4bit", **changes})


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
    with pytest.raises(ValueError, match="with 2 streamed blocks: call detach"):
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
        assert doors._largest((nn.Linear(2, 2), batch), {"num_items_in_batch": torch.tensor(4)}) == 10
    assert doors._largest((), {}) == 0


class InOrder(torch.utils.data.IterableDataset):
    """Samples in the order given."""

    def __init__(self, samples) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class RunsOut(LowMemTrainer):
    """Has no memory for some forwards or backwards."""

    failing: dict[int, str] = {}  # noqa: RUF012 - by number of the forward: where it fails
    forwards = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.forwards += 1
        where = self.failing.get(self.forwards)
        torch.rand(3)  # what a forward draws must be drawn again
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if where == "backward":
            loss = Failing.apply(loss)
        return loss


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")


RunsOut.__module__ = "hf_lowmem.tests"  # one of ours: it looks at no weights


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_moves_blocks_back_and_goes_on(tiny, tmp_path, memory, monkeypatch, where, capsys) -> None:
    settings = {"optim": "cpu_adam4bit", "max_steps": 5}
    model = tiny.model(num_hidden_layers=4, attention_dropout=0.3)
    whole = tiny.fit(RunsOut, tmp_path, model=model, optim_args="offload=none", **settings)
    monkeypatch.setattr(RunsOut, "failing", {2: where, 3: where, 6: where})
    model = tiny.model(num_hidden_layers=4, attention_dropout=0.3)
    trainer = tiny.fit(RunsOut, tmp_path, model=model, optim_args="offload=auto,gpu_memory=1GB", **settings)
    assert_same(tiny, whole, trainer)
    assert sum(block.kept for block in streamer_of(trainer.model).blocks) == 1
    assert capsys.readouterr().out.count("the GPU ran out of memory") == 3


def test_out_of_memory_that_nothing_helps_against(tiny, tmp_path, memory, monkeypatch) -> None:
    """All blocks are in RAM already, or gradients of the step are there: the error goes on, the model is at home."""
    monkeypatch.setattr(RunsOut, "failing", dict.fromkeys(range(2, 20), "forward"))
    for accumulated in (1, 2):
        model = tiny.model(num_hidden_layers=4)
        with pytest.raises(torch.OutOfMemoryError):
            tiny.fit(
                RunsOut,
                tmp_path,
                model=model,
                optim="cpu_adam4bit",
                optim_args="offload=auto,gpu_memory=1GB",
                gradient_accumulation_steps=accumulated,
            )
        assert not streamer_of(model)._there
        assert all(p.isfinite().all() for p in model.parameters())


def test_the_first_step_finds_no_room_for_activations(tiny, tmp_path, memory, monkeypatch, capsys) -> None:
    """They go to RAM then, if they are checkpointed and nobody has said no."""
    settings = {"optim": "cpu_adam4bit", "gradient_checkpointing": True}
    whole = tiny.fit(RunsOut, tmp_path, model=tiny.model(num_hidden_layers=4), optim_args="offload=none", **settings)
    monkeypatch.setattr(RunsOut, "failing", {1: "forward"})
    optim_args = "offload=auto,gpu_memory=1GB"
    trainer = tiny.fit(RunsOut, tmp_path, model=tiny.model(num_hidden_layers=4), optim_args=optim_args, **settings)
    assert_same(tiny, whole, trainer)
    assert "offload_activations=true" in capsys.readouterr().out
    assert trainer._inputs.nbytes > 0
    for changes, args in (({}, ",offload_activations=false"), ({"gradient_checkpointing": False}, "")):
        with pytest.raises(torch.OutOfMemoryError):
            tiny.fit(
                RunsOut,
                tmp_path,
                model=tiny.model(num_hidden_layers=4),
                optim_args=optim_args + args,
                **{**settings, **changes},
            )


def test_evaluation_out_of_memory(tiny, tmp_path, memory, monkeypatch) -> None:
    settings = {"optim": "cpu_adam4bit", "max_steps": 3, "trainer": {"eval_dataset": tiny.data(8)}}
    whole = tiny.fit(RunsOut, tmp_path, model=tiny.model(num_hidden_layers=4), optim_args="offload=none", **settings)
    model = tiny.model(num_hidden_layers=4)
    trainer = tiny.fit(RunsOut, tmp_path, model=model, optim_args="offload=auto,gpu_memory=1GB", **settings)
    expected = whole.evaluate()["eval_loss"]
    assert all(block.kept for block in streamer_of(model).blocks)
    monkeypatch.setattr(RunsOut, "failing", {trainer.forwards + 1: "forward"})
    assert trainer.evaluate()["eval_loss"] == expected
    assert sum(block.kept for block in streamer_of(model).blocks) == 3


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
