"""The streamer and the optimizer behind it, driven at random, against a model that nobody streams."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_attachment import LateLink, assert_at_home
from torch import nn

from hf_lowmem import LowBitAdamW, LowMemConfig, attach, attachment, detach
from hf_lowmem.kernels import native
from hf_lowmem.overlap import overlap

BLOCKS = 5
orders = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=7)


class Chain(nn.Module):
    """Blocks in whatever order they are asked for; one of them may fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(BLOCKS)])
        self.fails: int | None = None
        for i, block in enumerate(self.blocks):
            block[0].register_forward_hook(lambda *args, i=i: self._maybe_fail(i))

    def _maybe_fail(self, i: int) -> None:
        if self.fails == i:
            raise ZeroDivisionError

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for i in order:
            x = self.blocks[i](x)
        return x


def late(step):
    """The kernel, taking its time where it runs beside the model."""

    def slow(tensors, threads=None, ending=None):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)
        return step(tensors, threads, ending)

    return slow


class Machine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1000),
        offload=st.sampled_from(["cpu", "0.6"]),
        debug=st.booleans(),
        early=st.booleans(),
        travels=st.booleans(),
    )
    def start(self, seed: int, offload: str, debug: bool, early: bool, travels: bool) -> None:
        torch.set_num_threads(1)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(attachment, "HostLink", lambda: LateLink(seed))
        self.patch.setattr(native, "adam_step", late(native.adam_step))
        self.reference, self.model = Chain(), Chain()
        self.streamer = attach(self.model, LowMemConfig(offload=offload, debug=debug))
        self.optimizers = [LowBitAdamW(m.parameters(), lr=1e-2, state_bits=32) for m in (self.reference, self.model)]
        self.travels = travels
        overlap(self.streamer, self.optimizers[1], travels)
        self.early = early
        self.inputs = torch.Generator().manual_seed(seed)
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.optimizers[1].synchronize()
            self.patch.undo()

    def both(self, order: list[int]) -> list[torch.Tensor]:
        x = torch.randn(3, 8, generator=self.inputs)
        return [model(x, order) for model in (self.reference, self.model)]

    @rule(order=orders)
    def forward(self, order: list[int]) -> None:
        one, other = self.both(order)
        assert torch.equal(one, other)
        self.losses.append((one.square().sum(), other.square().sum()))

    @rule(order=orders)
    def evaluate(self, order: list[int]) -> None:
        with torch.no_grad():
            assert torch.equal(*self.both(order))

    @precondition(lambda self: self.losses)
    @rule(which=st.integers(0, 9))
    def backward(self, which: int) -> None:
        one, other = self.losses.pop(which % len(self.losses))
        one.backward()
        other.backward()
        self.compare_gradients()

    @precondition(lambda self: self.losses)
    @rule()
    def backward_of_the_sum(self) -> None:
        one, other = (sum(losses) for losses in zip(*self.losses, strict=True))
        self.losses.clear()
        one.backward()
        other.backward()
        self.compare_gradients()

    @precondition(lambda self: self.losses)
    @rule()
    def drop_a_graph(self) -> None:
        self.losses.pop()

    @rule(order=orders, fails=st.integers(0, BLOCKS - 1))
    def fail_in_forward(self, order: list[int], fails: int) -> None:
        if fails not in order:
            return
        self.model.fails = fails
        with pytest.raises(ZeroDivisionError):
            self.model(torch.zeros(3, 8), order)
        self.model.fails = None

    @precondition(lambda self: not self.losses)
    @rule(order=orders)
    def train(self, order: list[int]) -> None:
        """A step; what of it may go on afterwards goes on under whatever comes next."""
        one, other = self.both(order)
        self.streamer.early = self.early
        one.square().sum().backward()
        other.square().sum().backward()
        self.streamer.early = False
        for model, optimizer in zip((self.reference, self.model), self.optimizers, strict=True):
            optimizer.step()
            model.zero_grad()

    @precondition(lambda self: not self.losses)
    @rule(which=st.integers(0, BLOCKS - 1))
    def write_a_weight_at_home(self, which: int) -> None:
        self.optimizers[1].synchronize()
        for model in (self.reference, self.model):
            model.blocks[which][0].weight.data.mul_(0.5)

    @rule(set_to_none=st.booleans())
    def zero_gradients(self, set_to_none: bool) -> None:
        self.optimizers[1].synchronize()
        for model in (self.reference, self.model):
            model.zero_grad(set_to_none=set_to_none)

    @precondition(lambda self: not self.losses)
    @rule(offload=st.sampled_from(["cpu", "0.4"]))
    def attach_anew(self, offload: str) -> None:
        detach(self.model)
        self.streamer = attach(self.model, LowMemConfig(offload=offload))
        overlap(self.streamer, self.optimizers[1], self.travels)

    @precondition(lambda self: not self.losses)
    @rule(which=st.integers(0, BLOCKS - 1))
    def move_a_block(self, which: int) -> None:
        """To the device for good, or back."""
        block = self.streamer.blocks[which % len(self.streamer.blocks)]
        self.optimizers[1].about_to_move(p for _, p in block.params)
        (self.streamer.give_up if block.kept else self.streamer.keep)(block)
        overlap(self.streamer, self.optimizers[1], self.travels)

    @invariant()
    def everything_is_at_home(self) -> None:
        if hasattr(self, "streamer"):
            assert_at_home(self.streamer)

    @precondition(lambda self: not self.losses)
    @rule()
    def compare_weights(self) -> None:
        self.optimizers[1].synchronize()
        for (name, p), q in zip(self.reference.named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(p, q), name

    def compare_gradients(self) -> None:
        for (name, p), q in zip(self.reference.named_parameters(), self.model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
