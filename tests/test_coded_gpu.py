"""Weights in few bits on a real GPU, with its streams and kernels; test_coded.py has the same without."""

from __future__ import annotations

import os
import time

import pytest
import torch
from test_attachment import assert_at_home, build, checkpoint, run
from test_attachment_gpu import assert_same_on_gpu
from test_coded import as_seen

from hf_lowmem import LowMemConfig, LowMemTrainer, deferred
from hf_lowmem.attachment import attach, streamer_of
from hf_lowmem.coding import engine_of
from hf_lowmem.kernels import native_weights
from hf_lowmem.kernels import weights as reference_engine
from hf_lowmem.link import CudaLink

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, for the fixture below
FORMS = [("int8", 24), ("int4", 24), ("int8", 8)]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_triton_writes_and_reads() -> None:
    assert engine_of(torch.device("cuda:0")) is not reference_engine


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("offload", ["cpu", "0.5", "none"])
@pytest.mark.parametrize("checkpointing", ["off", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_device_sees_what_the_bits_say(tiny, form, checkpointing, offload, debug) -> None:
    weights, master = form
    reference, model = as_seen(build(tiny, "full"), weights).cuda(), build(tiny, "full")
    for m in (reference, model):
        checkpoint(m, checkpointing)
    streamer = attach(model, LowMemConfig(offload=offload, weights=weights, master_bits=master, debug=debug))
    assert streamer.link.device.type == "cuda"
    for _ in range(2):
        assert_same_on_gpu(run(reference), run(model))
        if master != 8:
            assert_at_home(streamer)
        assert not streamer._there


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}, {"max_grad_norm": 0}]
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_trainer(tiny, tmp_path, form, dtype, changes) -> None:
    runs = []
    for offload in ("0", "cpu", "0.5", "auto"):
        model = tiny.model(num_hidden_layers=4, dtype=dtype)
        optim_args = f"offload={offload},weights={form[0]},master_bits={form[1]}"
        args = {"optim": "cpu_adam4bit", "optim_args": optim_args, "use_cpu": False, "max_steps": 5}
        runs.append(tiny.fit(LowMemTrainer, tmp_path, model=model, **args, **changes))
    assert [sum(b.kept for b in streamer_of(run.model).blocks) for run in runs] == [4, 0, 2, 4]
    states = [{name: x.cpu() for name, x in run.model.state_dict().items()} for run in runs]
    losses = [[(log["loss"], log["grad_norm"]) for log in run.state.log_history if "loss" in log] for run in runs]
    for state, loss in zip(states[1:], losses[1:], strict=True):
        assert tiny.equal_bits(states[0], state)
        assert losses[0] == loss


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
def test_the_gpu_updates_8_bits_alone_on_the_way(tiny, tmp_path, monkeypatch, changes) -> None:
    updates, update, step = [], CudaLink.update, native_weights.step

    def slow(*args):
        time.sleep(0.02)  # so that there is something that the CPU has not begun
        return step(*args)

    monkeypatch.setattr(native_weights, "step", slow)
    monkeypatch.setattr(deferred, "MARGIN", -1)

    def counted(self, part) -> None:
        updates.append(part)
        update(self, part)

    monkeypatch.setattr(CudaLink, "update", counted)
    runs = []
    for offload in ("0", "cpu"):
        model = tiny.model(num_hidden_layers=6, dtype="bfloat16", hidden_size=256, intermediate_size=512)
        optim_args = f"offload={offload},weights=int8,master_bits=8"
        args = {"optim": "cpu_adam4bit", "optim_args": optim_args, "use_cpu": False, "max_steps": 8}
        run = tiny.fit(LowMemTrainer, tmp_path, model=model, **args, **changes)
        losses = [(log["loss"], log["grad_norm"]) for log in run.state.log_history if "loss" in log]
        states = [
            x.cpu()
            for state in run.optimizer.state_dict()["state"].values()
            for x in state.values()
            if isinstance(x, torch.Tensor)
        ]
        runs.append((losses, {name: x.cpu() for name, x in run.model.state_dict().items()}, states))
        assert bool(updates) == (offload == "cpu")
    assert runs[0][0] == runs[1][0]
    assert tiny.equal_bits(runs[0][1], runs[1][1])
    assert all(torch.equal(one, other) for one, other in zip(runs[0][2], runs[1][2], strict=True))
