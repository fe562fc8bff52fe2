"""Integer products under torch's own parallel wrappers: two processes, gradients that are those of the whole batch."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hf_lowmem.lowbit import quantize

rank, store, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))


x = torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(5))
plain = net()
plain(x.flatten(0, 1)).square().mean().backward()
model = net()
quantize(model)
if kind == "ddp":
    wrapped = nn.parallel.DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    wrapped = fully_shard(model, mesh=mesh)
for _ in range(2):
    wrapped.zero_grad()
    wrapped(x[rank]).square().mean().backward()
    for p, exact in zip(model.parameters(), plain.parameters()):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        error = ((grad - exact.grad).norm() / exact.grad.norm()).item()
        assert 0 < error < 0.03, error
dist.barrier()
print("close", flush=True)
os._exit(0)  # gloo's threads now and then abort a process that takes them down
"""


@pytest.mark.skipif(sys.platform != "linux", reason="gloo's file store")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(tiny, tmp_path, kind) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    with ThreadPoolExecutor(2) as pool:
        argv = [(str(rank), str(tmp_path / "store"), kind) for rank in range(2)]
        runs = [pool.submit(tiny.python, SCRIPT, *each, check=False) for each in argv]
    for done in (run.result() for run in runs):
        assert done.stdout == "close\n", done.stderr[-3000:]  # said when all has been compared
