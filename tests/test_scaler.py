"""Loss scaling, where gradients wait in host memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.amp import grad_scaler

from hf_lowmem import LowMemTrainer
from hf_lowmem.scaler import wait_for_scales


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_norm_is_that_of_unscaled_gradients(tiny, tmp_path, offload) -> None:
    """GradScaler writes gradients in place, without a trace in their version."""
    args = tiny.args(tmp_path, optim="cpu_adam4bit", optim_args=f"offload={offload}")
    trainer = LowMemTrainer(model=tiny.model(), args=args, train_dataset=tiny.data())
    trainer.create_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batch = {name: value[None] for name, value in tiny.data(1)[0].items()}
    loss = trainer.model(**batch).loss
    scaler.scale(loss).backward()
    trainer.accelerator.scaler = scaler
    trainer.accelerator.unscale_gradients = lambda: scaler.unscale_(trainer.optimizer)
    norm = trainer._measure_gradients(trainer.model, 1.0)
    twin = tiny.model()
    twin(**batch).loss.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_scale_in_host_memory_is_waited_for(monkeypatch) -> None:
    """Once for each copy from a GPU, and only for those."""
    waited = []
    monkeypatch.setattr(grad_scaler._MultiDeviceReplicator, "get", grad_scaler._MultiDeviceReplicator.get)
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    wait_for_scales()
    once = grad_scaler._MultiDeviceReplicator.get
    wait_for_scales()
    assert grad_scaler._MultiDeviceReplicator.get is once
    copies = {"device": torch.device("cuda"), "to": lambda device, **kwargs: torch.ones(())}
    replicator = grad_scaler._MultiDeviceReplicator(SimpleNamespace(**copies))
    replicator.get(torch.device("cuda", 0))
    assert waited == []
    assert replicator.get(torch.device("cpu")) == 1
    assert waited == [1]
    ours = grad_scaler._MultiDeviceReplicator(torch.ones(()))
    assert ours.get(torch.device("cpu")) == 1
    assert waited == [1]


@pytest.mark.gpu
def test_fp16_on_a_gpu(tiny, tmp_path) -> None:
    runs = []
    for offload in ("none", "cpu"):
        settings = {"optim": "cpu_adam32bit", "optim_args": f"offload={offload}", "use_cpu": False, "fp16": True}
        runs.append(tiny.fit(LowMemTrainer, tmp_path, model=tiny.model(num_hidden_layers=4), **settings))
    norms = [[log["grad_norm"] for log in run.state.log_history if "grad_norm" in log] for run in runs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
