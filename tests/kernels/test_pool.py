"""The threads of the compiled core, when something is raised among them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hf_lowmem.kernels import native
from hf_lowmem.kernels.adam import AdamConstants, AdamTensor


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end pytest if it got out."""


@pytest.mark.parametrize("raising", ["caller", "worker"])
def test_nothing_runs_in_the_pool_after_an_exception(raising: str) -> None:
    caller, lock, started, done = threading.get_ident(), threading.Lock(), [0], [0]
    others_work = threading.Event()

    def function(first: int, last: int) -> int:
        with lock:
            started[0] += 1
        here = threading.get_ident() == caller
        if here and raising == "caller":
            assert others_work.wait(30)
            raise Interrupted
        others_work.set()
        if not here and raising == "worker":
            raise Interrupted
        time.sleep(0.2 if not here else 0.01)
        with lock:
            done[0] += 1
        return 1

    with pytest.raises(Interrupted):
        native._spread(function, 100, 1, 3, None)
    at_the_end = started[0], done[0]
    time.sleep(0.3)
    assert (started[0], done[0]) == at_the_end
    assert done[0] >= started[0] - 2  # those that raised have not ended; all others have
    if raising == "caller":
        assert started[0] < 10
    assert native._spread(lambda first, last: last - first, 100, 1, 3, None) == 100


def test_the_pool_waits_through_a_second_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    running, waits = [0], []
    wait = native.wait

    def interrupted(futures: list[object]) -> object:
        waits.append(len(futures))
        if len(waits) < 3:
            raise Interrupted
        return wait(futures)

    def function(first: int, last: int) -> int:
        if threading.get_ident() == caller:
            time.sleep(0.1)
            raise Interrupted
        running[0] += 1
        time.sleep(0.5)
        running[0] -= 1
        return 1

    caller = threading.get_ident()
    monkeypatch.setattr(native, "wait", interrupted)
    with pytest.raises(Interrupted):
        native._spread(function, 100, 1, 2, None)
    assert running == [0]
    assert len(waits) == 3


@pytest.mark.skipif(not native.available(), reason="the compiled core is not built")
def test_buffers_live_as_long_as_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(native.pool, "run", lambda work, held, stop, threads, ending: seen.append(held) or 0)
    n, constants = 300_000, AdamConstants.of(32, 1, 1e-3, 0.9, 0.99, 1e-8, 0.0)
    buffers = [torch.zeros(n) for _ in range(4)]
    tensor = AdamTensor(*buffers, None, None, 32, constants)
    native.adam_step([tensor], 2)
    ((records, tensors),) = seen
    assert isinstance(records, bytearray)
    assert tensors == [tensor]


def adam_tensor(n: int) -> AdamTensor:
    constants = AdamConstants.of(32, 1, 1e-3, 0.9, 0.99, 1e-8, 0.0)
    return AdamTensor(*[torch.ones(n) for _ in range(4)], None, None, 32, constants)


@pytest.mark.skipif(not native.available(), reason="the compiled core is not built")
def test_a_stopped_step_takes_no_more_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.pool, "run", lambda work, held, stop, threads, ending: (stop(), work(held))[1])
    tensor = adam_tensor(300_000)
    assert native.adam_step([tensor], 2) == 0
    assert bool((tensor.weight == 1).all())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_second_step_begins_while_the_first_is_ending(threads: int) -> None:
    """Whoever waits for a step hears of its ending once, before it is done, and the bits are the same."""
    tensors = [adam_tensor(300_000) for _ in range(3)]
    said: list[str] = []
    second = threading.Thread(target=lambda: native.adam_step([tensors[1]], threads, lambda: said.append("second")))
    native.adam_step([tensors[0]], threads, lambda: (said.append("first"), second.start()))
    second.join()
    native.adam_step([tensors[2]])
    assert said == ["first", "second"]
    assert torch.equal(tensors[0].weight, tensors[2].weight)
    assert torch.equal(tensors[1].weight, tensors[2].weight)
