"""Streaming to a real GPU, with its streams. All of it needs one; test_attachment.py has the same without."""

from __future__ import annotations

import os

import pytest
import torch
from test_attachment import assert_at_home, assert_same, build, checkpoint, run
from transformers import Trainer

from hf_lowmem import LowMemConfig, LowMemTrainer
from hf_lowmem.attachment import attach, streamer_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, for the fixture below


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same_on_gpu(one, other) -> None:
    assert one[0] == other[0]
    assert_same(one, (other[0], {n: g if g is None else g.to(one[1][n].device) for n, g in other[1].items()}))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("offload", ["cpu", 0.5])
@pytest.mark.parametrize("checkpointing", ["off", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["full", "frozen embedding", "norms alone", "lora", "experts"])
def test_streamed_is_unstreamed(tiny, kind, checkpointing, offload, debug) -> None:
    reference, model = build(tiny, kind).cuda(), build(tiny, kind)
    for m in (reference, model):
        checkpoint(m.get_base_model() if kind == "lora" else m, checkpointing)
    streamer = attach(model, LowMemConfig(offload=offload, debug=debug))
    assert streamer.link.device.type == "cuda"
    for _ in range(2):
        assert_same_on_gpu(run(reference), run(model))
        assert_at_home(streamer)
        assert not streamer._there


def test_a_large_model_in_a_little_memory(tiny) -> None:
    """Blocks that take their time, so that copies and computation overlap, under memory that holds three of them."""
    config = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "dtype": "bfloat16"}
    tokens = torch.randint(3, 128, (4, 128), device="cuda")
    results = []
    for offload in ("none", "cpu"):
        model = tiny.model(**config).train()
        checkpoint(model, "non-reentrant")
        attach(model, LowMemConfig(offload=offload))
        model.to("cuda")
        weights = sum(p.nbytes for p in model.model.layers.parameters())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        grown = torch.cuda.max_memory_allocated() - before
        results.append((loss.item(), {n: p.grad.cpu() for n, p in model.named_parameters()}))
        if offload == "cpu":
            assert all(p.device.type == "cpu" for p in model.model.layers.parameters())
            assert grown < weights * 10 / 12  # 3 blocks, 3 of their gradients, and activations
        del model
    assert_same(*results)


@pytest.mark.parametrize("optim", ["cpu_adam4bit", "cpu_adam32bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}, {"bf16": True}])
def test_trainer(tiny, tmp_path, optim, dtype, changes) -> None:
    runs = []
    for offload in ("none", "cpu"):
        model = tiny.model(num_hidden_layers=4, dtype=dtype)
        args = {"optim": optim, "optim_args": f"offload={offload}", "use_cpu": False, "max_steps": 5}
        runs.append(tiny.fit(LowMemTrainer, tmp_path, model=model, **args, **changes))
    assert streamer_of(runs[1].model) is not None
    whole, streamed = (tiny.weights(run.model) for run in runs)
    assert tiny.equal_bits({n: w.cpu() for n, w in whole.items()}, {n: w.cpu() for n, w in streamed.items()})
    losses = [[(log["loss"], log["grad_norm"]) for log in run.state.log_history if "loss" in log] for run in runs]
    assert losses[0] == losses[1]


def test_fp16_and_the_stock_trainer(tiny, tmp_path) -> None:
    runs = []
    for offload in ("none", "cpu"):
        model = tiny.model(num_hidden_layers=4)
        attach(model, LowMemConfig(offload=offload))
        args = {"optim": "cpu_adam4bit", "use_cpu": False, "fp16": True, "max_steps": 5}
        runs.append(tiny.fit(Trainer, tmp_path, model=model, **args))
    losses = [[log["loss"] for log in run.state.log_history if "loss" in log] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
