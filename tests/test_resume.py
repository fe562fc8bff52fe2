"""A resumed run is the run; a checkpoint that cannot be resumed is refused before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from hf_lowmem import LowMemTrainer

CLASSES = {"Trainer": Trainer, "LowMemTrainer": LowMemTrainer}
RUN = {
    "optim": "cpu_adam4bit",
    "max_steps": 5,
    "save_strategy": "steps",
    "save_steps": 1,
    "lr_scheduler_type": "cosine",
}


def dropout_model(tiny):
    return tiny.model(dtype="bfloat16", attention_dropout=0.2)


def last_bits(folder):
    """What the last checkpoint of a run holds: weights and optimizer, flat."""
    optimizer = torch.load(folder / "checkpoint-5" / "optimizer.pt", weights_only=True)
    values = {f"{i}.{key}": x for i, state in optimizer["state"].items() for key, x in state.items()}
    values = {key: torch.as_tensor(value) for key, value in values.items()}
    return {**load_file(folder / "checkpoint-5" / "model.safetensors"), **values}


RESUME = """
import json, sys
sys.path.insert(0, sys.argv[1])
import transformers
import hf_lowmem
from conftest import fit, make_model
root, run = sys.argv[2], json.loads(sys.argv[3])
for name, cls in (("Trainer", transformers.Trainer), ("LowMemTrainer", hf_lowmem.LowMemTrainer)):
    for step in range(1, 5):
        model = make_model(seed=step, dtype="bfloat16", attention_dropout=0.2)
        checkpoint = f"{root}/{name}/checkpoint-{step}"
        trainer = fit(cls, f"{root}/{name}-{step}", model, resume=checkpoint, optim_args="threads=1", **run)
        print(name, step, trainer.optimizer.optimizer.threads)
"""


def test_resuming_at_every_checkpoint_gives_the_same_bits(tiny, tmp_path):
    """In a new process, with another number of threads, into a model of other weights, with dropout, at 4 bits."""
    for name, cls in CLASSES.items():
        trainer = tiny.fit(cls, tmp_path / name, dropout_model(tiny), optim_args="threads=2", **RUN)
        assert trainer.optimizer.optimizer.threads == 2
    said = tiny.python(RESUME, str(tiny.root / "tests"), str(tmp_path), json.dumps(RUN)).stdout.splitlines()
    assert [line for line in said if line.endswith(" 1") and "Trainer" in line] == [
        f"{name} {step} 1" for name in CLASSES for step in range(1, 5)
    ]
    for name in CLASSES:
        wanted = last_bits(tmp_path / name)
        assert any(key.endswith(".extension") for key in wanted)
        for step in range(1, 5):
            assert tiny.equal_bits(wanted, last_bits(tmp_path / f"{name}-{step}")), (name, step)


def test_resume_true_takes_the_last_checkpoint(tiny, tmp_path):
    tiny.fit(LowMemTrainer, tmp_path, **{**RUN, "save_steps": 2, "max_steps": 4})
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-4 has no optimizer\.pt"):
        tiny.fit(LowMemTrainer, tmp_path, resume=True, **RUN)


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """A checkpoint of four steps at 4 bits, not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.fit(Trainer, folder, **{**RUN, "save_steps": 4})
    return folder / "checkpoint-4"


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoint-4")


def refused(tiny, folder, cls, checkpoint, error, message, **changes):
    model = tiny.model(seed=9)
    before = tiny.weights(model)
    with pytest.raises(error, match=message) as caught:
        tiny.fit(cls, folder / "again", model, resume=str(checkpoint), **{**RUN, **changes})
    assert tiny.equal_bits(before, tiny.weights(model)), "the checkpoint's weights were loaded before it was refused"
    return str(caught.value)


@pytest.mark.parametrize("cls", CLASSES.values())
@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt"])
def test_a_missing_file(tiny, tmp_path, checkpoint, cls, file):
    (checkpoint / file).unlink()
    said = refused(tiny, tmp_path, cls, checkpoint, FileNotFoundError, f"checkpoint-4 has no {re.escape(file)}")
    assert "save_only_model=True" in said
    assert f"from_pretrained({str(checkpoint)!r})" in said


@pytest.mark.parametrize("cls", CLASSES.values())
@pytest.mark.parametrize("size", [0, 100, 0.5, -1])
def test_a_truncated_optimizer(tiny, tmp_path, checkpoint, cls, size):
    path = checkpoint / "optimizer.pt"
    whole = path.read_bytes()
    keep = {0: 0, 100: 100, 0.5: len(whole) // 2, -1: len(whole) - 1}[size]
    path.write_bytes(whole[:keep])
    message = re.escape(f"{path} ({keep:,} bytes) cannot be read")
    assert "truncated or damaged" in refused(tiny, tmp_path, cls, checkpoint, RuntimeError, message)


@pytest.mark.parametrize("cls", CLASSES.values())
@pytest.mark.parametrize("at", [0.3, 0.5, 0.7])
def test_a_flipped_bit(tiny, tmp_path, checkpoint, cls, at):
    path = checkpoint / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 16
    path.write_bytes(data)
    assert "damaged" in refused(tiny, tmp_path, cls, checkpoint, RuntimeError, r"optimizer\.pt .*cannot be read")


@pytest.mark.parametrize("cls", CLASSES.values())
def test_something_else_in_the_file(tiny, tmp_path, checkpoint, cls):
    (checkpoint / "optimizer.pt").write_text("hello")
    refused(tiny, tmp_path, cls, checkpoint, RuntimeError, r"optimizer\.pt \(5 bytes\) cannot be read")


@pytest.mark.parametrize("cls", CLASSES.values())
def test_other_widths(tiny, tmp_path, cls):
    """Upward converts: 4 to 8 to 32. Downward is refused, with what to write instead."""
    last, run = None, {**RUN, "save_steps": 2}
    for i, bits in enumerate((4, 8, 32)):
        changes = {**run, "optim": f"cpu_adam{bits}bit", "max_steps": 2 * i + 2}
        trainer = tiny.fit(cls, tmp_path / str(bits), tiny.model(seed=bits), resume=last, **changes)
        assert trainer.state.global_step == 2 * i + 2
        states = trainer.optimizer.optimizer.state.values()
        assert {state["step"] for state in states} == {2 * i + 2}
        assert min(state["bits"] for state in states) == bits
        last = str(tmp_path / str(bits) / f"checkpoint-{2 * i + 2}")
    for saved, wanted, step in ((32, 8, 6), (32, 4, 6), (8, 4, 4)):
        checkpoint = tmp_path / str(saved) / f"checkpoint-{step}"
        message = rf'optimizer\.pt holds {saved}-bit states, and this run has {wanted}-bit .*optim="cpu_adam{saved}bit"'
        refused(tiny, tmp_path, cls, checkpoint, ValueError, message, optim=f"cpu_adam{wanted}bit", max_steps=9)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_other_masters(tiny, tmp_path, cls):
    run = {**RUN, "save_steps": 2, "max_steps": 2}
    for bits in (24, 32):
        model = tiny.model(dtype="bfloat16")
        tiny.fit(cls, tmp_path / str(bits), model, optim_args=f"master_bits={bits}", **run)
    up = {**run, "max_steps": 3, "optim_args": "master_bits=32"}
    tiny.fit(cls, tmp_path / "up", tiny.model(dtype="bfloat16"), resume=str(tmp_path / "24" / "checkpoint-2"), **up)
    message = r'was written with master_bits=32, and this run has 24: .*optim_args="master_bits=32"'
    refused(tiny, tmp_path, cls, tmp_path / "32" / "checkpoint-2", ValueError, message)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_a_checkpoint_of_adamw_torch(tiny, tmp_path, cls):
    tiny.fit(Trainer, tmp_path / "stock", **{**RUN, "optim": "adamw_torch", "max_steps": 2})
    checkpoint = tmp_path / "stock" / "checkpoint-2"
    refused(tiny, tmp_path, cls, checkpoint, ValueError, "holds 32-bit states, and this run has 4-bit ones")
    trainer = tiny.fit(cls, tmp_path / "ours", resume=str(checkpoint), **{**RUN, "optim": "cpu_adam32bit"})
    assert {state["step"] for state in trainer.optimizer.optimizer.state.values()} == {5}


def test_weights_only_loading_gives_plain_things(saved):
    def plain(value):
        if isinstance(value, dict):
            return all(plain(x) for pair in value.items() for x in pair)
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return value is None or type(value) in (torch.Tensor, int, float, bool, str)

    assert plain(torch.load(saved / "optimizer.pt", weights_only=True))
