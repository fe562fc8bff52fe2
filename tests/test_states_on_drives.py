"""LowMemTrainer with ``nvme_path``: states that RAM has no room for rest in files, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import os
import re
import weakref
from pathlib import Path

import pytest
import torch
from counted_memory import auto
from test_streamed_trainer import assert_same, fit
from transformers import Trainer, TrainerCallback

from hf_lowmem import DoesNotFit, LowMemConfig, LowMemTrainer, create_optimizer
from hf_lowmem.attachment import streamer_of
from hf_lowmem.files import PosixFile
from hf_lowmem.plan import Footprint, Rest, footprint

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning", "ignore:.*tmpfs.*", "ignore:.*page cache.*"
)
LAYERS = 8


def sizes(tiny, **config) -> Footprint:
    """Of one block, trained."""
    model = tiny.model(num_hidden_layers=LAYERS, dtype=config.pop("dtype", "bfloat16"))
    optimizer = create_optimizer(model, LowMemConfig(**config))
    return footprint(model.model.layers[0].parameters(), optimizer.widths())


def budget(tiny, short: float, **config) -> str:
    """RAM for all blocks, but for the states and masters of so many."""
    one = sizes(tiny, **config)
    return f"{int(LAYERS * one.total - short * (one.masters + one.states))}B"


def resting(trainer) -> list[int]:
    """The numbers of blocks whose states are on a drive."""
    trainer.optimizer.optimizer._deferred.wait()
    state, blocks = trainer.optimizer.state, streamer_of(trainer.model).blocks
    return [b.number for b in blocks if any(state[p]["m"].is_meta for _, p in b.params)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "max_grad_norm": 0.01},
        {"optim": "cpu_adam32bit"},
        {"optim": "cpu_adam8bit", "dtype": "float32"},
    ],
    ids=["plain", "accumulated", "checkpointed", "32 bits", "8 bits, fp32"],
)
def test_the_same_training(tiny, tmp_path, changes, capsys) -> None:
    changes = {"optim": "cpu_adam4bit", "dtype": "bfloat16", **changes}
    bits = int(changes["optim"].removeprefix("cpu_adam").removesuffix("bit"))
    room = budget(tiny, 2, state_bits=bits, dtype=changes["dtype"])
    whole = fit(tiny, tmp_path, "none", layers=LAYERS, **changes)
    args = f"nvme_path={tmp_path},cpu_memory={room}"
    streamed = fit(tiny, tmp_path, "cpu", optim_args=args, layers=LAYERS, **changes)
    assert resting(streamed) == list(range(2, 8))
    assert f"states of 6 blocks rest on {tmp_path}" in capsys.readouterr().out
    assert_same(tiny, whole, streamed)
    with pytest.raises(DoesNotFit, match="nvme_path saves"):
        fit(tiny, tmp_path, "cpu", optim_args=f"cpu_memory={room}", layers=LAYERS, **changes)


def test_updated_in_backward(tiny, tmp_path) -> None:
    changes = {"optim": "cpu_adam4bit", "dtype": "bfloat16", "max_grad_norm": 0.0, "layers": LAYERS}
    one = sizes(tiny)
    room = int(LAYERS * (one.total - one.gradients) - one.masters)
    whole = fit(tiny, tmp_path, "none", **changes)
    streamed = fit(tiny, tmp_path, "cpu", optim_args=f"nvme_path={tmp_path},cpu_memory={room}B", **changes)
    assert resting(streamed)
    assert_same(tiny, whole, streamed)


def test_resumed_is_never_stopped(tiny, tmp_path) -> None:
    """Also where the states rest somewhere else after it; checkpoints are what they always were."""
    changes = {"optim": "cpu_adam4bit", "dtype": "bfloat16", "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    drive = f"nvme_path={tmp_path},cpu_memory={budget(tiny, 3)}"
    runs = [
        fit(tiny, tmp_path / name, "cpu", optim_args=args, layers=LAYERS, **changes)
        for name, args in (("ram", ""), ("drive", drive))
    ]
    assert resting(runs[1])
    one, other = (torch.load(tmp_path / name / "checkpoint-3" / "optimizer.pt") for name in ("ram", "drive"))
    for key, state in one["state"].items():
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(other["state"][key][n])) for n, x in state.items())
    for name, args in (("ram", drive), ("drive", ""), ("drive", drive)):
        checkpoint = str(tmp_path / name / "checkpoint-3")
        resumed = fit(tiny, tmp_path / "on", "cpu", optim_args=args, layers=LAYERS, resume=checkpoint, **changes)
        assert bool(resting(resumed)) == bool(args)
        assert tiny.equal_bits(tiny.weights(resumed.model), tiny.weights(runs[0].model))


def test_blocks_that_move(tiny, tmp_path, memory) -> None:
    changes = {"dtype": "bfloat16", "layers": LAYERS}
    args = f"nvme_path={tmp_path},cpu_memory={budget(tiny, 3)}"
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit", **changes)
    placed = auto(tiny, tmp_path, optim_args=args, **changes)
    assert all(block.kept for block in streamer_of(placed.model).blocks)
    assert not resting(placed)
    memory.limit = placed._placement.plan.gpu - 4 * placed._placement._cost
    some = auto(tiny, tmp_path, optim_args=args, **changes)
    streamed = sum(not block.kept for block in streamer_of(some.model).blocks)
    assert 0 < streamed < LAYERS
    assert some._placement.plan.on_drive.total == 0  # there is room for those few
    assert_same(tiny, whole, placed)
    assert_same(tiny, whole, some)


def test_blocks_that_move_in_the_middle(tiny, tmp_path, memory) -> None:
    changes = {"dtype": "bfloat16", "layers": LAYERS, "max_steps": 8}
    whole = fit(tiny, tmp_path, "none", optim="cpu_adam4bit", **changes)
    first = auto(tiny, tmp_path, **changes)
    memory.limit = first._placement.plan.gpu - 4 * first._placement._cost
    found = []

    class Moves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            placement = kwargs["model"] and trainers[-1]._placement
            if 2 <= state.global_step <= 5 and state.global_step != 4:
                assert placement.make_room()
            found.append(resting(trainers[-1]))

    class Remembered(LowMemTrainer):
        def __init__(self, *args, **kwargs) -> None:
            trainers.append(self)
            super().__init__(*args, **kwargs)

    trainers: list[LowMemTrainer] = []
    one = sizes(tiny)
    where = f"offload=auto,gpu_memory=1GB,nvme_path={tmp_path},cpu_memory={int(5.5 * one.total)}B"
    settings = {"optim": "cpu_adam4bit", "max_steps": 8, "optim_args": where, "trainer": {"callbacks": [Moves()]}}
    model = tiny.model(num_hidden_layers=LAYERS, dtype="bfloat16")
    moved = tiny.fit(Remembered, tmp_path, model=model, **settings)
    counts = [len(numbers) for numbers in found]
    assert counts[0] == 0
    assert counts[-1] > 2
    assert_same(tiny, whole, moved)


def test_nothing_is_left_behind(tiny, tmp_path) -> None:
    folder = tmp_path / "a drive, ö"
    folder.mkdir()
    lowmem = {"nvme_path": [str(folder)], "cpu_memory": budget(tiny, 3)}
    changes = {"optim": "cpu_adam4bit", "dtype": "bfloat16", "layers": LAYERS}
    trainer = fit(tiny, tmp_path, "cpu", trainer={"lowmem": lowmem}, **changes)
    assert resting(trainer)
    assert list(folder.iterdir())
    trainer.optimizer.optimizer.leave_drive()
    assert not resting(trainer)
    assert not list(folder.iterdir())


def test_refused_before_anything_is_made(tiny, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for path, error in (("missing", FileNotFoundError), ("file", NotADirectoryError)):
        with pytest.raises(error, match=path):
            fit(tiny, tmp_path, "cpu", optim="cpu_adam4bit", optim_args=f"nvme_path={tmp_path / path}")
    with pytest.raises(ValueError, match='streams nothing: write offload="auto"'):
        fit(tiny, tmp_path, "none", optim="cpu_adam4bit", optim_args=f"nvme_path={tmp_path}")
    with pytest.raises(ValueError, match="names no folder"):
        LowMemConfig(nvme_path=" ; ", offload="cpu")
    assert LowMemConfig(nvme_path="/a; /b c", offload="cpu").nvme_path == ["/a", "/b c"]
    assert LowMemConfig(nvme_path=[Path("/a"), "/b"], offload="cpu").nvme_path == ["/a", "/b"]


def test_ram_comes_first() -> None:
    homes, others = [Footprint(20, 10, 10, 20)] * 10, Footprint(5)
    whole = Footprint(205, 100, 100, 200)
    assert Rest.of(homes, others, 605, True) == Rest.of(homes, others, None, True) == Rest(whole)
    assert Rest.of(homes, others, 100, False) == Rest(whole)
    assert Rest.of([], others, 1, True) == Rest(others)
    # 80 for four groups on their way: 7 blocks' 140 are gone
    assert Rest.of(homes, others, 545, True) == Rest(Footprint(205, 30, 30, 200), Footprint(0, 70, 70, 0), 7, 80)
    assert Rest.of(homes, others, 544, True).blocks == 8
    assert Rest.of(homes, others, 1, True) == Rest(Footprint(205, 0, 0, 200), Footprint(0, 100, 100, 0), 10, 80)


def test_32_bit_masters_are_refused(tiny, tmp_path) -> None:
    args = f"nvme_path={tmp_path},master_bits=32,cpu_memory={budget(tiny, 2, master_bits=32)}"
    with pytest.raises(ValueError, match=r"32-bit master of a 16-bit weight .* cannot rest on a drive"):
        fit(tiny, tmp_path, "cpu", optim="cpu_adam4bit", optim_args=args, layers=LAYERS, dtype="bfloat16")


def test_only_our_trainers_take_it(tiny, tmp_path) -> None:
    with pytest.raises(ValueError, match="nvme_path changes what happens"):
        create_optimizer(tiny.model(), LowMemConfig(nvme_path=str(tmp_path)))
    with pytest.raises(ValueError, match="nvme_path changes what happens"):
        tiny.fit(Trainer, tmp_path, model=tiny.model(), optim="cpu_adam4bit", optim_args=f"nvme_path={tmp_path}")


def test_what_the_hint_promises_is_what_is_saved(tiny, tmp_path) -> None:
    room = int(1.05 * LAYERS * sizes(tiny).weights)

    def fails(extra: str) -> str:
        args = f"cpu_memory={room}B{extra}"
        with pytest.raises(DoesNotFit) as found:
            fit(tiny, tmp_path, "cpu", optim="cpu_adam4bit", optim_args=args, layers=LAYERS, dtype="bfloat16")
        return str(found.value)

    size = r"(?:needs|nvme_path saves) ([\d.]+) MB"
    (needed, saved), (then,) = (re.findall(size, fails(extra)) for extra in ("", f",nvme_path={tmp_path}"))
    assert float(needed) - float(saved) == pytest.approx(float(then), abs=0.21)  # what is rounded for the reader


def trained(tiny, tmp_path, **changes):
    args = f"nvme_path={tmp_path},cpu_memory={budget(tiny, 3)}"
    settings = {"optim": "cpu_adam4bit", "layers": LAYERS, "dtype": "bfloat16", **changes}
    return fit(tiny, tmp_path, "cpu", optim_args=args, **settings)


def test_after_a_failure_nothing_is_saved_and_nothing_kept(tiny, tmp_path, monkeypatch) -> None:
    write, failing = PosixFile._write_some, []

    def some(self, buffer, offset):
        if failing:
            raise OSError(5, "Input/output error")
        return write(self, buffer, offset)

    monkeypatch.setattr(PosixFile, "_write_some", some)

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            if state.global_step == 3:
                failing.append(1)

    trainers: list[LowMemTrainer] = []

    class Remembered(LowMemTrainer):
        def __init__(self, *args, **kwargs) -> None:
            trainers.append(self)
            super().__init__(*args, **kwargs)

    def fail() -> None:
        args = f"offload=cpu,nvme_path={tmp_path},cpu_memory={budget(tiny, 3)}"
        model = tiny.model(num_hidden_layers=LAYERS, dtype="bfloat16")
        settings = {"optim": "cpu_adam4bit", "optim_args": args, "max_steps": 8, "trainer": {"callbacks": [Fails()]}}
        with pytest.raises((OSError, RuntimeError), match=r"store\.bin.* at offset|at offset .*store\.bin"):
            tiny.fit(Remembered, tmp_path, model=model, **settings)

    fail()
    optimizer = trainers.pop().optimizer.optimizer
    with pytest.raises(RuntimeError, match="are of several steps: resume from a checkpoint"):
        optimizer.state_dict()
    gone = weakref.ref(optimizer)
    failing.clear()
    del optimizer
    gc.collect()
    assert gone() is None


def test_a_file_that_is_gone_or_cut_is_said(tiny, tmp_path) -> None:
    optimizer = trained(tiny, tmp_path).optimizer.optimizer
    optimizer.synchronize()
    (file,) = tmp_path.rglob("store.bin")
    size = file.stat().st_size
    os.truncate(file, 4096)
    with pytest.raises(OSError, match=r"store\.bin: wanted \d+ bytes at offset \d+ .* the file has 4096"):
        optimizer.state_dict()
    os.truncate(file, size)
    optimizer.state_dict()
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"store\.bin: wanted .* the file is gone: resume"):
        optimizer.state_dict()


def test_states_that_others_drop_and_copies_of_the_optimizer(tiny, tmp_path) -> None:
    class Drops(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
            if state.global_step == 2:
                optimizer = getattr(optimizer, "optimizer", optimizer)
                optimizer.synchronize()
                del optimizer.state[model.model.layers[5].mlp.up_proj.weight]
                copies.append(copy.deepcopy(optimizer))

    copies: list[torch.optim.Optimizer] = []
    one = trained(tiny, tmp_path, trainer={"callbacks": [Drops()]})
    changes = {"optim": "cpu_adam4bit", "layers": LAYERS, "dtype": "bfloat16"}
    other = fit(tiny, tmp_path, "cpu", trainer={"callbacks": [Drops()]}, **changes)
    assert_same(tiny, one, other)
    assert resting(one)
    ordered = (sorted(c.state.values(), key=lambda state: state["index"]) for c in copies)
    for found, wanted in zip(*ordered, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(x)) for key, x in wanted.items())
