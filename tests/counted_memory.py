"""A "device" in host memory whose bytes are counted, for tests of what is placed there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from test_streamed_trainer import fit

from hf_lowmem import LowMemTrainer
from hf_lowmem import trainer as doors
from hf_lowmem.attachment import streamer_of
from hf_lowmem.placement import Placement


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


def count(monkeypatch) -> CountedMemory:
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
