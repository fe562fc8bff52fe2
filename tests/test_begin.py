"""A forward whose first blocks are fetched at the end of the step before it."""

from __future__ import annotations

import functools

import pytest
import torch
from test_streamed_trainer import assert_same, fit
from transformers import TrainerCallback

from hf_lowmem import trainer as trainers
from hf_lowmem.attachment import streamer_of
from hf_lowmem.link import HostLink
from hf_lowmem.overlap import overlap
from hf_lowmem.stream import Streamer

SETTINGS = {"optim": "cpu_adam4bit", "layers": 6}


@pytest.fixture
def begun(monkeypatch):
    """How many blocks were on the "device" after each step, which updates them on their way there, as a GPU does."""
    monkeypatch.setattr(trainers, "overlap", functools.partial(overlap, travels=True))
    counts = []
    begin = Streamer.begin

    def counted(self) -> None:
        begin(self)
        counts.append(len(self._there))

    monkeypatch.setattr(Streamer, "begin", counted)
    return counts


def test_the_next_forward_has_begun(tiny, tmp_path, begun) -> None:
    whole = fit(tiny, tmp_path, "none", **SETTINGS)
    streamed = fit(tiny, tmp_path, "cpu", **SETTINGS)
    assert_same(tiny, whole, streamed)
    assert len(begun) == 5
    assert max(begun) == 3  # the CPU may be at one of them just then
    streamer = streamer_of(streamed.model)
    assert streamer.fetches == 5 * (6 + 4) + begun[-1]  # backward begins with the last two, the last step in vain
    assert not streamer._there  # after the training nothing is


def test_evaluations_and_checkpoints_between(tiny, tmp_path, begun) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    data = {"trainer": {"eval_dataset": tiny.data(8)}}
    whole = fit(tiny, tmp_path / "a", "none", **SETTINGS, **changes, **data)
    streamed = fit(tiny, tmp_path / "b", "cpu", **SETTINGS, **changes, **data)
    assert_same(tiny, whole, streamed)
    assert max(begun) == 3


class Writes(TrainerCallback):
    """Somebody's own."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            p.data.mul_(0.9)  # of which nothing can be seen


def test_not_where_somebody_may_write_weights(tiny, tmp_path, begun) -> None:
    whole = fit(tiny, tmp_path, "none", **SETTINGS, trainer={"callbacks": [Writes()]})
    streamed = fit(tiny, tmp_path, "cpu", **SETTINGS, trainer={"callbacks": [Writes()]})
    assert_same(tiny, whole, streamed)
    assert begun == []


def test_a_weight_written_since_is_fetched_again(tiny, tmp_path, begun) -> None:
    """By whoever waits first, as the documents say."""
    model = tiny.model(num_hidden_layers=6)
    trainer = fit(tiny, tmp_path, "cpu", model=model, **SETTINGS)
    streamer = streamer_of(model)
    inputs = {name: value[None] for name, value in tiny.data(1)[0].items()}
    model.eval()
    with torch.no_grad():
        before = model(**inputs).loss
        streamer.begin()
        assert len(streamer._there) == 3
        streamer.synchronize()
        model.model.layers[1].mlp.up_proj.weight.mul_(3.0)
        fetches = streamer.fetches
        changed = model(**inputs).loss
        assert streamer.fetches == fetches + 4  # three that were not there, and the one that was written
        model.model.layers[1].mlp.up_proj.weight.div_(3.0)
        after = model(**inputs).loss
    assert changed != before
    assert after == pytest.approx(before.item(), rel=1e-6)
    assert not streamer._there
    assert trainer.state.global_step == 5


def test_a_forward_in_another_order(tiny, tmp_path, begun) -> None:
    """What was fetched for nothing is given up, and no more is there than at any time."""
    model = tiny.model(num_hidden_layers=6)
    fit(tiny, tmp_path, "cpu", model=model, **SETTINGS)
    streamer = streamer_of(model)
    streamer.begin()
    x = torch.randn(1, 4, 64)
    rotary = model.model.rotary_emb(x, torch.arange(4)[None])
    with torch.no_grad():
        for i in (5, 4, 3):
            model.model.layers[i](x, position_embeddings=rotary)
            assert len(streamer._there) <= 3
    streamer.go_home()
    assert not streamer._there


def test_without_memory_the_forward_begins_later(tiny, tmp_path, begun, monkeypatch) -> None:
    whole = fit(tiny, tmp_path, "none", **SETTINGS)
    begin, fetch = Streamer.begin, HostLink.fetch
    beginning = []

    def begin_without(self) -> None:
        beginning.append(1)
        begin(self)
        beginning.clear()

    def no_memory(self, slot, home):
        if beginning:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return fetch(self, slot, home)

    monkeypatch.setattr(Streamer, "begin", begin_without)
    monkeypatch.setattr(HostLink, "fetch", no_memory)
    streamed = fit(tiny, tmp_path, "cpu", **SETTINGS)
    assert begun == [0] * 5
    assert_same(tiny, whole, streamed)
