"""Optimizer states that rest on a drive: the same training, bit for bit, with a few of them in memory."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_late import Chain

from hf_lowmem import LowBitAdamW, LowMemConfig, attach, attachment
from hf_lowmem.drive_states import DriveStates, layer_of
from hf_lowmem.overlap import overlap
from hf_lowmem.state import new_state


class Extents:
    """Places in memory that take their time, in the order in which they were asked for."""

    def __init__(self, sizes, seconds: float = 0.0) -> None:
        assert all(size % 4096 == 0 for size in sizes.values())
        self.places = {key: torch.zeros(size, dtype=torch.uint8) for key, size in sizes.items()}
        self.written: dict[str, int] = {}
        self.seconds, self.closed, self.fails = seconds, False, ""
        self.log: list[tuple[str, str]] = []
        self.thread = ThreadPoolExecutor(1)
        self.files: dict[str, Path] = {}

    def _later(self, what: str, key: str, action) -> Ticket:
        self.log.append((what, key))

        def run() -> None:
            time.sleep(self.seconds)
            if self.fails == what:
                raise OSError(f"{what} of {key} failed")
            action()

        return Ticket(self.thread.submit(run))

    def read(self, key, buffer, version):
        assert self.written[key] == version, "it is not what was written last"
        return self._later("read", key, lambda: buffer.copy_(self.places[key]))

    def write(self, key, buffer, version):
        self.written[key] = version
        assert buffer.numel() == self.places[key].numel()
        return self._later("write", key, lambda: self.places[key].copy_(buffer))

    def segments(self, key):
        """As on two drives, the second of which has a page."""
        self.thread.submit(int).result()
        if key not in self.files:
            handle, name = tempfile.mkstemp()
            os.close(handle)
            self.files[key] = name = Path(name)
            weakref.finalize(self, name.unlink)
        name = self.files[key]
        name.write_bytes(bytes(4096) + self.places[key].numpy().tobytes())
        size = self.places[key].numel()
        return [(name, 4096, size - 4096), (name, size, 4096)]

    def close(self) -> None:
        self.closed = True
        self.thread.shutdown()


class Ticket:
    def __init__(self, future: Future) -> None:
        self.wait, self.done = future.result, future.done


def buffer(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8)


def make(numbers=None, seconds: float = 0.0, dtype=torch.bfloat16, **options):
    model = Chain().to(dtype)
    streamer = attach(model, LowMemConfig(offload="cpu", debug=True))
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2, seed=3, **options)
    overlap(streamer, optimizer)
    made: list[Extents] = []

    def places(sizes):
        made.append(Extents(sizes, seconds))
        return made[-1]

    optimizer.use_drive(places, range(len(streamer.blocks)) if numbers is None else numbers, buffer)
    reference = Chain().to(dtype)
    plain = LowBitAdamW(reference.parameters(), lr=1e-2, seed=3, **options)
    return model, optimizer, made[0], reference, plain


def train(model, optimizer, seed: int, dtype=torch.bfloat16) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).square().mean().backward()
    optimizer.scale_gradients(0.5)
    optimizer.step()
    model.zero_grad()


def assert_same(model, optimizer, reference, plain) -> None:
    optimizer.synchronize()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
    one, other = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert one.keys() == other.keys()
    for key, state in other.items():
        assert one[key].keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(one[key][name]), torch.as_tensor(x)) for name, x in state.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"state_bits": 8}, {"state_bits": 32}, {"master_bits": 16}], ids=str)
@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_the_same_training(options, dtype, seconds) -> None:
    model, optimizer, places, reference, plain = make(seconds=seconds, dtype=dtype, **options)
    for number in range(4):
        train(model, optimizer, number, dtype)
        train(reference, plain, number, dtype)
    resting = [p for p in model.parameters() if optimizer.state[p]["m"].is_meta]
    assert len(resting) == sum(p in optimizer._deferred.groups for p in model.parameters()) > 0
    assert_same(model, optimizer, reference, plain)
    assert {key for _, key in places.log} == set(places.places)


def test_some_groups_rest_there() -> None:
    model, optimizer, places, reference, plain = make(numbers=[1, 3])
    for number in range(3):
        train(model, optimizer, number)
        train(reference, plain, number)
    assert set(places.places) == {"1", "3"}
    groups = optimizer._deferred.groups
    assert all(optimizer.state[p]["m"].is_meta == (groups.get(p) in (1, 3)) for p in model.parameters())
    assert_same(model, optimizer, reference, plain)


def test_reads_go_ahead_of_writes() -> None:
    model, optimizer, places, *_ = make(seconds=0.01)
    train(model, optimizer, 0)
    optimizer.synchronize()
    places.log.clear()
    train(model, optimizer, 1)
    optimizer.synchronize()
    order = {entry: i for i, entry in enumerate(places.log)}
    keys = [key for what, key in places.log if what == "read"]
    assert sorted(keys) == sorted(places.places)
    assert all(order["read", later] < order["write", earlier] for earlier, later in itertools.pairwise(keys))


def test_no_more_memory_than_its_buffers() -> None:
    taken: list[int] = []
    model = Chain().to(torch.bfloat16)
    streamer = attach(model, LowMemConfig(offload="cpu"))
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2)
    overlap(streamer, optimizer)
    numbers = range(len(streamer.blocks))
    optimizer.use_drive(Extents, numbers, lambda nbytes: (taken.append(nbytes), buffer(nbytes))[1], buffers=3)
    for number in range(3):
        train(model, optimizer, number)
    assert len(taken) == 3
    held = sum(
        x.nbytes
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, torch.Tensor) and not x.is_meta
    )
    assert held < taken[0]  # what belongs to no block
    assert optimizer.nbytes()["states"] > 0
    optimizer.leave_drive()
    with pytest.raises(ValueError, match="takes 3 or more"):
        optimizer.use_drive(Extents, numbers, buffer, buffers=2)


def test_weights_written_by_others_lose_their_masters_alone() -> None:
    model, optimizer, _, reference, plain = make()
    for number in range(4):
        train(model, optimizer, number)
        train(reference, plain, number)
        optimizer.synchronize()
        for m in (model, reference):
            with torch.no_grad():
                next(iter(m.parameters())).mul_(1.5)
                list(m.parameters())[-1].add_(0.25)
    assert_same(model, optimizer, reference, plain)


def test_saved_loaded_copied_and_moved() -> None:
    model, optimizer, places, reference, plain = make()
    for number in range(2):
        train(model, optimizer, number)
        train(reference, plain, number)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 5)
    weights = [p.detach().clone() for p in reference.parameters()]
    optimizer.synchronize()
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    optimizer.load_state_dict(saved)
    assert any(state["m"].is_meta for state in optimizer.state.values())
    train(model, optimizer, 2)
    train(reference, plain, 2)
    assert any(state["m"].is_meta for state in optimizer.state.values())
    assert_same(model, optimizer, reference, plain)
    optimizer.about_to_move([next(iter(model.parameters()))])
    train(model, optimizer, 3)
    train(reference, plain, 3)
    assert_same(model, optimizer, reference, plain)
    other = pickle.loads(pickle.dumps(optimizer))
    assert not places.closed
    assert any(state["m"].is_meta for state in optimizer.state.values())
    assert not any(state["m"].is_meta for state in other.state.values())
    train(model, optimizer, 4)
    train(reference, plain, 4)
    assert_same(model, optimizer, reference, plain)


def test_a_group_without_some_gradients_stays_in_ram() -> None:
    model, optimizer, _, reference, plain = make()
    left_out = next(p for p in model.parameters() if optimizer._deferred.groups.get(p) == 1)
    for number in range(3):
        for m, o in ((model, optimizer), (reference, plain)):
            x = torch.randn(5, 96, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
            m(x).square().mean().backward()
            if number == 0:
                index = [p is left_out for p in model.parameters()].index(True)
                list(m.parameters())[index].grad = None
            o.step()
            m.zero_grad()
        assert optimizer._rests(1) == (number > 0)
    assert_same(model, optimizer, reference, plain)


@pytest.mark.parametrize("what", ["read", "write"])
def test_what_goes_wrong_is_said(what) -> None:
    model, optimizer, places, *_ = make()
    train(model, optimizer, 0)
    optimizer.synchronize()
    places.fails = what

    def train_on() -> None:
        for number in range(3):
            train(model, optimizer, number)
            optimizer.synchronize()

    with pytest.raises(OSError, match=f"{what} of . failed"):
        train_on()
    places.fails = ""


def test_groups_out_of_turn_and_at_a_time() -> None:
    states = {number: {torch.empty(0): new_state(5000 + number, 4, number)} for number in range(6)}
    layers = {number: layer_of(held.values()) for number, held in states.items()}
    drive = DriveStates(lambda sizes: Extents(sizes, 0.002), buffer, buffers=3)
    drive.take_in(layers)
    for number, held in states.items():
        assert drive.put(number, held)
        assert drive.holds(number, held)
    for number in range(6):
        drive.enqueue(number)

    def change(numbers) -> None:
        for number in numbers:
            for tensors in drive.open(number).values():
                tensors["m_scale"].fill_(number + 1.0)
            drive.close(number)

    threads = [threading.Thread(target=change, args=(numbers,)) for numbers in ([0, 4, 2], [5, 1, 3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    drive.synchronize()
    for number, held in states.items():
        drive.bring(number, held)
        assert not drive.holds(number, held)
        (state,) = held.values()
        assert bool((state["m_scale"] == number + 1).all())
        assert bool((state["m"] == new_state(10, 4, 0)["m"][0]).all())
    drive.end()


def test_what_rests_stays_when_others_come_and_go() -> None:
    model, optimizer, first, reference, plain = make(numbers=[2, 3])
    streamer = attachment.streamer_of(model)
    made: list[Extents] = []

    def places(sizes):
        made.append(Extents(sizes))
        return made[-1]

    optimizer._drive._make = places
    for number, numbers in enumerate(([2, 3], [1, 2, 3], [3], [1, 3], [])):
        overlap(streamer, optimizer)
        optimizer.use_drive(places, numbers, buffer)
        assert [n for n in range(4) if optimizer._rests(n)] == [n for n in numbers if number and n in (2, 3)]
        train(model, optimizer, number)
        train(reference, plain, number)
        optimizer.synchronize()
        assert [n for n in range(4) if optimizer._rests(n)] == numbers
        first.log.clear()
    assert [list(extents.places) for extents in made] == [["1"]]  # the others had theirs
    assert_same(model, optimizer, reference, plain)
    optimizer.leave_drive()
    assert first.closed
    assert made[0].closed


def test_a_group_that_is_stepped_at_once_is_brought_to_ram() -> None:
    params = [torch.nn.Parameter(torch.randn(96, 64).to(torch.bfloat16)) for _ in range(3)]
    params[1].data = params[1].data.t()  # not contiguous: no kernel writes it where it is
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, plain = (LowBitAdamW(ps, lr=1e-2, seed=3) for ps in (params, twins))
    optimizer.defer([[params[0], params[1]], [params[2]]])
    optimizer.use_drive(Extents, [0, 1], buffer)
    for number in range(3):
        for p, q in zip(params, twins, strict=True):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
            p.grad, q.grad = grad.clone(), grad.clone()
        optimizer.step()
        plain.step()
    optimizer.synchronize()
    assert [optimizer._rests(number) for number in (0, 1)] == [False, True]
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
    one, other = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for key, state in other.items():
        assert all(torch.equal(torch.as_tensor(one[key][name]), torch.as_tensor(x)) for name, x in state.items())
