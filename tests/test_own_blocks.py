"""What blocks may do with their inputs and outputs, without any of today's models: streamed against unstreamed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from architectures import CASES, Case, Chain, Counting, in_turn, model_of, run, text, vectors
from test_attachment import LateLink, assert_at_home, assert_same, gradients
from torch import nn

from hf_lowmem import LowMemConfig, attachment
from hf_lowmem.attachment import attach


@pytest.fixture(autouse=True)
def one_thread(tiny) -> None: ...


class Pair(nn.Module):
    """Two lanes that do not meet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x) + x, self.b(y).tanh() + y


class Writes(nn.Module):
    """A block that writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, seen: Any = None) -> torch.Tensor:
        if isinstance(seen, dict):
            seen["x"] = self.linear(seen.get("x", x))
            return x + seen["x"]
        if isinstance(seen, list):
            seen.append(self.linear(x))
            return x + sum(seen)
        x += 1
        return x + self.linear(x)


class Either(nn.Module):
    """A block that does one thing or another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return x + (self.a(x) if first else self.b(x))


def lanes(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = x
    for block in blocks:
        x, y = block(x, y)
    return x + y.tanh().tanh()


def with_a(kind: Callable[[], Any]) -> Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]:
    def call(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        seen = kind()
        for block in blocks:
            x = block(x, seen)
        return x

    return call


def all_outputs(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    outputs = [x]
    for block in blocks:
        outputs.append(block(outputs[-1]))
    return sum(out * out for out in outputs)


def twice(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for first in (True, False):
        for block in blocks:
            x = block(x, first)
    return x


class SlowSending(LateLink):
    """Copies up that are far behind all copies down."""

    def __init__(self) -> None:
        super().__init__()
        self._up = ThreadPoolExecutor(4)

    def send(self, pairs, slot=None):
        def copy(home: torch.Tensor, source: torch.Tensor) -> None:
            time.sleep(0.02)
            home.copy_(source)

        sent = [self._up.submit(copy, home, source.clone()) for home, source in pairs]
        self._sent += sent
        if slot is not None:
            self.release(slot)
        return sent


OWN = {
    "lanes": (Pair, lanes),
    "outputs used later": (Counting, all_outputs),
    "a dict": (Writes, with_a(dict)),
    "a list": (Writes, with_a(list)),
    "in place": (Writes, in_turn),
    "used twice": (Either, twice),
}


@pytest.mark.parametrize(
    ("block", "call"),
    [pytest.param(block, call, id=name.replace(" ", "-")) for name, (block, call) in OWN.items()],
)
def test_blocks_of_ones_own(monkeypatch, block, call) -> None:
    """What a block may do with its inputs and outputs, without any of today's models."""
    monkeypatch.setattr(attachment, "HostLink", SlowSending)
    case = Case(lambda: Chain(block, call), vectors)
    reference, model = model_of(case), model_of(case)
    streamer = attach(model, LowMemConfig(offload="cpu"))
    assert_same(run(reference, case), run(model, case))
    assert_at_home(streamer)


def test_two_forwards_of_a_reentrant_checkpoint(monkeypatch) -> None:
    """Each of them brings gradients of its own, within one backward."""
    monkeypatch.setattr(attachment, "HostLink", SlowSending)
    results = []
    for streamed in (False, True):
        model = model_of(CASES["llama"], "reentrant")
        if streamed:
            attach(model, LowMemConfig(offload="cpu"))
        loss = model(**text(0)).loss - 0.5 * model(**text(1)).loss
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert_same(*results)
