"""``offload="auto"`` on a real GPU, with its memory. test_placement.py has the same without one."""

from __future__ import annotations

import os

import pytest
import torch

from hf_lowmem import LowMemTrainer
from hf_lowmem.attachment import streamer_of
from hf_lowmem.placement import Placement

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, for the fixture below
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def fit(tiny, folder, offload, budget="", data=None, **changes):
    settings = {"use_cpu": False, "optim": "cpu_adam4bit", "gradient_checkpointing": True, "max_steps": 6}
    settings |= {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "per_device_train_batch_size": 8}
    optim_args = ",".join(filter(None, [f"offload={offload}", budget, changes.pop("optim_args", "")]))
    torch.cuda.reset_peak_memory_stats()
    return tiny.fit(
        LowMemTrainer,
        folder,
        model=tiny.model(**SHAPE),
        optim_args=optim_args,
        trainer={"train_dataset": data or tiny.data(64, 512)},
        **{**settings, **changes},
    )


def on_cpu(tiny, trainer):
    return {name: p.cpu() for name, p in tiny.weights(trainer.model).items()}


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}])
def test_keeps_what_fits_and_trains_the_same(tiny, tmp_path, changes, capsys, monkeypatch) -> None:
    peaks = []  # of the steps that are measured, and of what comes after them
    adjust = Placement._adjust
    monkeypatch.setattr(
        Placement, "_adjust", lambda self: (peaks.append(torch.cuda.max_memory_allocated()), adjust(self))
    )
    whole = on_cpu(tiny, fit(tiny, tmp_path, "none", **changes))
    torch.cuda.empty_cache()
    counts = []
    for budget in ("1.45GB", "1.8GB", "3GB"):
        peaks.clear()
        trainer = fit(tiny, tmp_path, "auto", f"gpu_memory={budget}", **changes)
        peak = max(torch.cuda.max_memory_allocated(), *peaks[-1:])
        placement = trainer._placement
        assert tiny.equal_bits(whole, on_cpu(tiny, trainer)), budget
        assert peak <= placement.memory.available
        assert peak == pytest.approx(placement.plan.gpu, rel=0.1)
        counts.append(sum(block.kept for block in streamer_of(trainer.model).blocks))
        assert "planned" in capsys.readouterr().out
        del trainer, placement
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert counts == sorted(counts)
    assert 0 <= counts[0] < counts[1] < counts[2] == 12


def test_batches_that_grow_and_evaluation(tiny, tmp_path) -> None:
    """Longer batches than the first one's, and an evaluation without any care for memory."""
    data = [*tiny.data(16, 64), *tiny.data(16, 1024), *tiny.data(16, 512)]

    class InOrder(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)

    changes = {"per_device_eval_batch_size": 8}
    whole = on_cpu(tiny, fit(tiny, tmp_path, "none", data=InOrder(), **changes))
    torch.cuda.empty_cache()
    trainer = fit(tiny, tmp_path, "auto", "gpu_memory=1.9GB", data=InOrder(), **changes)
    assert tiny.equal_bits(whole, on_cpu(tiny, trainer))
    assert 0 < sum(block.kept for block in streamer_of(trainer.model).blocks) < 12
    assert trainer.evaluate(tiny.data(16, 2048))["eval_loss"] > 0
    assert torch.cuda.max_memory_allocated() <= trainer._placement.memory.available


def test_activations_in_ram(tiny, tmp_path) -> None:
    whole = on_cpu(tiny, fit(tiny, tmp_path, "none"))
    for offload in ("cpu", "0.5"):
        trainer = fit(tiny, tmp_path, offload, optim_args="offload_activations=true")
        assert tiny.equal_bits(whole, on_cpu(tiny, trainer))
        assert trainer._inputs.nbytes >= 9 * 8 * 512 * 1024 * 2


def test_nothing_streamed_keeps_states_on_the_gpu(tiny, tmp_path) -> None:
    """`offload="0"`: what `auto` says where everything fits."""
    whole = on_cpu(tiny, fit(tiny, tmp_path, "none"))
    trainer = fit(tiny, tmp_path, "0")
    assert streamer_of(trainer.model) is None
    assert tiny.equal_bits(whole, on_cpu(tiny, trainer))
    states = [x for state in trainer.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    assert {x.device.type for x in states} == {"cuda"}
