"""A GPU that runs out of memory all the same: blocks move back to RAM, and what has failed is done again."""

from __future__ import annotations

import pytest
import torch
from counted_memory import auto
from test_streamed_trainer import assert_same, fit

from hf_lowmem import LowMemTrainer
from hf_lowmem.attachment import streamer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


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

    def _place(self, *args):
        super()._place(*args)

        def fail_at_the_end(module, args, out):
            where = self.failing.get(self.forwards)
            if where == "end of backward" and out.requires_grad:
                out.register_hook(lambda gradient: fail())

        self.model.model.embed_tokens.register_forward_hook(fail_at_the_end)


def fail() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")


RunsOut.__module__ = "hf_lowmem.tests"  # one of ours: it looks at no weights


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_moves_blocks_back_and_goes_on(
    tiny, tmp_path, memory, monkeypatch, where, capsys, max_grad_norm
) -> None:
    """Also where updates begin in backward, if none has begun."""
    settings = {"optim": "cpu_adam4bit", "max_steps": 5, "max_grad_norm": max_grad_norm}
    model = tiny.model(num_hidden_layers=4, attention_dropout=0.3)
    whole = tiny.fit(RunsOut, tmp_path, model=model, optim_args="offload=none", **settings)
    monkeypatch.setattr(RunsOut, "failing", {2: where, 3: where, 6: where})
    model = tiny.model(num_hidden_layers=4, attention_dropout=0.3)
    trainer = tiny.fit(RunsOut, tmp_path, model=model, optim_args="offload=auto,gpu_memory=1GB", **settings)
    assert_same(tiny, whole, trainer)
    assert sum(block.kept for block in streamer_of(trainer.model).blocks) == 1
    assert capsys.readouterr().out.count("the GPU ran out of memory") == 3


def test_out_of_memory_after_the_first_update_goes_on(tiny, tmp_path, memory, monkeypatch) -> None:
    """Weights of the step before would be gone. With clipping there has been no update."""
    settings = {"optim": "cpu_adam4bit", "max_steps": 5, "optim_args": "offload=auto,gpu_memory=1GB"}
    whole = tiny.fit(RunsOut, tmp_path, model=tiny.model(num_hidden_layers=4), **settings)
    memory.limit = memory.taken() - 10**5  # some are streamed
    monkeypatch.setattr(RunsOut, "failing", {4: "end of backward"})
    trainer = tiny.fit(RunsOut, tmp_path, model=tiny.model(num_hidden_layers=4), **settings)
    assert trainer.forwards == 6
    assert_same(tiny, whole, trainer)
    model = tiny.model(num_hidden_layers=4)
    with pytest.raises(torch.OutOfMemoryError):
        tiny.fit(RunsOut, tmp_path, model=model, max_grad_norm=0.0, **settings)
    assert not streamer_of(model)._there
    assert all(p.isfinite().all() for p in model.parameters())


def test_memory_that_has_to_be_given_back_in_every_step(tiny, tmp_path, memory, monkeypatch, capsys) -> None:
    """The allocator stops for that: one block less stays, until it has not to."""
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit", max_steps=8)
    asked = []

    def retries() -> int:
        asked.append(sum(block.kept for block in streamer_of(memory.trainer.model).blocks))
        return 1 if asked[-1] == 4 else 0

    monkeypatch.setattr(memory, "retries", retries)
    trainer = auto(tiny, tmp_path, max_steps=8)
    assert asked == [4, 4, 4, 3, 3]  # where blocks have just moved, memory has only found its places
    assert sum(block.kept for block in streamer_of(trainer.model).blocks) == 3
    assert_same(tiny, whole, trainer)


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
