"""Updates that the device does on the way, because it needs a block before the CPU has come to it."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import pytest
import torch
from test_attachment import LateLink
from test_late import Chain

from hf_lowmem import LowBitAdamW, LowMemConfig, attach, attachment
from hf_lowmem.deferred import Deferred, StateSlab
from hf_lowmem.kernels import native
from hf_lowmem.overlap import overlap
from hf_lowmem.state import new_state


class Busy:
    """A CPU that does not get beyond the first update before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.by_thread: list[str] = []
        self.step = native.adam_step
        monkeypatch.setattr(native, "adam_step", self)

    def __call__(self, tensors, threads=None, ending=None):
        name = threading.current_thread().name
        if name.startswith("hf_lowmem_late"):
            assert self.go.wait(10)
        self.by_thread.append(name)
        return self.step(tensors, threads, ending)


def make(monkeypatch, travels: bool = True, dtype: torch.dtype = torch.float32, **options):
    link = LateLink(1)
    monkeypatch.setattr(attachment, "HostLink", lambda: link)
    model = Chain().to(dtype)
    streamer = attach(model, LowMemConfig(offload="cpu", debug=True))
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2, seed=3, **options)
    overlap(streamer, optimizer, travels)
    reference = Chain().to(dtype)
    plain = LowBitAdamW(reference.parameters(), lr=1e-2, seed=3, **options)
    return model, optimizer, streamer, link, reference, plain


def train(model, optimizer, seed: int, dtype: torch.dtype = torch.float32, between=lambda: None) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).square().mean().backward()
    between()
    optimizer.scale_gradients(0.5)
    optimizer.step()
    model.zero_grad()


def assert_same(model, optimizer, reference, plain) -> None:
    optimizer.synchronize()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
        one, other = optimizer.state[p], plain.state[q]
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert torch.equal(torch.as_tensor(one[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_bits", [4, 8, 32])
def test_the_device_updates_what_the_cpu_has_not_come_to(monkeypatch, state_bits, dtype) -> None:
    model, optimizer, _, link, reference, plain = make(monkeypatch, dtype=dtype, state_bits=state_bits)
    busy, begin = Busy(monkeypatch), link.begin

    def third_lets_the_cpu_go(*args):
        if link.updates % 3 == 2:
            busy.go.set()
        return begin(*args)

    monkeypatch.setattr(link, "begin", third_lets_the_cpu_go)
    for number in range(4):
        train(reference, plain, number, dtype)
        # Its forward needs the updates of the step before.
        train(model, optimizer, number, dtype, between=busy.go.clear)
    busy.go.set()
    assert link.updates == 9  # in each of three forwards, all but the one that the CPU had begun
    assert not optimizer._deferred._taken  # nothing is held that was read
    assert_same(model, optimizer, reference, plain)


def test_nothing_travels_unasked(monkeypatch) -> None:
    model, optimizer, _, link, reference, plain = make(monkeypatch, travels=False)
    for number in range(3):
        train(model, optimizer, number)
        train(reference, plain, number)
    assert link.updates == 0
    assert_same(model, optimizer, reference, plain)


@pytest.mark.parametrize("reader", ["synchronize", "state_dict", "optimizer's state_dict", "step"])
def test_who_reads_waits_for_what_is_on_its_way_home(monkeypatch, reader) -> None:
    model, optimizer, streamer, link, reference, plain = make(monkeypatch)
    busy = Busy(monkeypatch)
    train(model, optimizer, 0)
    with torch.no_grad():
        threading.Timer(0.05, busy.go.set).start()
        model(torch.zeros(5, 96))
    assert link.updates == 3
    {
        "synchronize": streamer.synchronize,
        "state_dict": model.state_dict,
        "optimizer's state_dict": optimizer.state_dict,
        "step": lambda: train(model, optimizer, 1),
    }[reader]()
    train(reference, plain, 0)
    if reader == "step":
        train(reference, plain, 1)
    assert_same(model, optimizer, reference, plain)


def test_states_and_gradients_that_were_replaced_do_not_travel(monkeypatch) -> None:
    """A state dict loaded, a gradient of somebody's own."""
    model, optimizer, _, link, reference, plain = make(monkeypatch)
    for number in range(2):
        train(model, optimizer, number)
        train(reference, plain, number)
    optimizer.load_state_dict(optimizer.state_dict())
    for number in range(2, 4):
        train(model, optimizer, number)
        train(reference, plain, number)
    assert_same(model, optimizer, reference, plain)
    before = link.updates
    for m, o in ((model, optimizer), (reference, plain)):
        m(torch.ones(5, 96)).square().mean().backward()
        for p in m.parameters():
            p.grad = p.grad * 2
        o.step()
        m.zero_grad()
    with torch.no_grad():
        model(torch.zeros(5, 96))
    assert link.updates == before
    assert_same(model, optimizer, reference, plain)


def test_32_bit_masters_stay(monkeypatch) -> None:
    settings = {"dtype": torch.bfloat16, "master_bits": 32}
    model, optimizer, _, link, reference, plain = make(monkeypatch, **settings)
    for number in range(3):
        train(model, optimizer, number, torch.bfloat16)
        train(reference, plain, number, torch.bfloat16)
    assert link.updates == 0
    assert_same(model, optimizer, reference, plain)


@pytest.mark.parametrize("failing", ["begin", "first update", "second update"])
def test_an_update_that_the_device_cannot_do_is_done_all_the_same(monkeypatch, failing) -> None:
    """Parameters that it has done are not done again, the others by the CPU."""
    model, optimizer, streamer, link, reference, plain = make(monkeypatch)
    busy = Busy(monkeypatch)
    train(model, optimizer, 0)
    train(reference, plain, 0)
    calls, update = [], link.update

    def failing_update(part):
        calls.append(part)
        if failing == "begin" or len(calls) == (1 if failing == "first update" else 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        update(part)

    if failing == "begin":
        monkeypatch.setattr(link, "begin", failing_update_of_begin(link))
    else:
        monkeypatch.setattr(link, "update", failing_update)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.zeros(5, 96))
    monkeypatch.undo()
    busy.go.set()
    streamer.go_home()
    assert_same(model, optimizer, reference, plain)
    train(model, optimizer, 1)
    train(reference, plain, 1)
    assert_same(model, optimizer, reference, plain)


def failing_update_of_begin(link):
    begin = link.begin

    def fail(*args):
        begin(*args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    return fail


def test_gradients_zeroed_while_they_are_read_are_heard_of(monkeypatch) -> None:
    model, optimizer, _, _, reference, plain = make(monkeypatch, travels=False)
    busy = Busy(monkeypatch)
    x = torch.randn(5, 96)
    model(x).square().mean().backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    busy.go.set()
    with pytest.raises(RuntimeError, match="a gradient was written while the update by it was under way"):
        optimizer.synchronize()
    # The optimizer's own way waits.
    model, optimizer, _, _, reference, plain = make(monkeypatch, travels=False)
    for m, o in ((model, optimizer), (reference, plain)):
        m(x).square().mean().backward()
        o.step()
        o.zero_grad(set_to_none=False)
    assert_same(model, optimizer, reference, plain)


@pytest.mark.parametrize("travels", [False, True])
def test_a_learning_rate_written_in_place_is_the_next_step_s(monkeypatch, travels) -> None:
    model, optimizer, _, _, reference, plain = make(monkeypatch, travels=travels)
    for o in (optimizer, plain):
        for group in o.param_groups:
            group["lr"] = torch.tensor(1e-2)
    busy = Busy(monkeypatch)
    train(model, optimizer, 0)
    busy.go.clear()
    for o, m in ((optimizer, None), (plain, reference)):
        if m is not None:
            train(m, o, 0)
        for group in o.param_groups:
            group["lr"].fill_(0.5)
    threading.Timer(0.05, busy.go.set).start()
    with torch.no_grad():
        model(torch.zeros(5, 96))
    assert_same(model, optimizer, reference, plain)


def test_a_slab_of_states() -> None:
    states = [new_state(5000, 4, 0), new_state(10, 32, 1)]
    states[0]["extension"] = torch.arange(5000).to(torch.int8)
    states[1]["m"] += 3
    copies = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in states]
    slab = StateSlab(states, pin=False)
    assert slab.holds(states)
    for number, (state, copy) in enumerate(zip(states, copies, strict=True)):
        views = slab.unpack(number, slab.part(number).clone())
        for key, value in copy.items():
            assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value))
            if isinstance(value, torch.Tensor):
                assert torch.equal(views[key], value)
    file = io.BytesIO()
    torch.save(states, file)
    for state, loaded in zip(states, torch.load(io.BytesIO(file.getvalue()), weights_only=True), strict=True):
        assert all(torch.equal(torch.as_tensor(loaded[key]), torch.as_tensor(value)) for key, value in state.items())
    states[1]["m"] = states[1]["m"].clone()
    assert not slab.holds(states)


def test_who_is_sooner_by_far_does_it() -> None:
    """A GPU takes an update if that takes it less than half of the time until the CPU would have done it."""
    deferred, go = Deferred(), threading.Event()
    luggage = SimpleNamespace(fits=lambda weights, grads: True)
    grads = [torch.zeros(100)]
    for number in range(4):
        deferred.add(number, lambda start, ending: go.wait(10), grads, True, luggage)
    deferred._seconds = 1.0  # for a value
    while deferred._late.state(0) != "running":
        pass
    assert deferred.take(0, {}, {}, 0.0) is None  # the CPU is at it
    assert deferred.take(1, {}, {}, 76.0) is None  # half of the first and the second: 150 s
    assert deferred.take(1, {}, {}, 74.0) is luggage
    assert deferred.take(3, {}, {}, 126.0) is None  # 250 s, without the one that was taken
    assert deferred.take(3, {}, {}, 124.0) is luggage
    for number in (1, 3):
        deferred._hand_over(number, lambda: None, lambda: True)
    go.set()
    deferred.wait()
    assert 0 < deferred._seconds < 1.0
