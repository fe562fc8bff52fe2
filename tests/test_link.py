"""The order that ``CudaLink`` keeps between streams, seen through streams that only remember. At the end, on a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lowmem.link import CudaLink, Slot
from hf_lowmem.memory import use_expandable_segments

CPU = torch.device("cpu")


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.of: tuple[str, int] | None = None

    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...


class Stream:
    """Remembers what it has waited for; ``done`` counts what has been given to it."""

    made: list[str] = []  # noqa: RUF012

    def __init__(self, device: object = None, name: str = "") -> None:
        self.name = name or f"stream {len(self.made)}"
        self.made.append(self.name)
        self.done = 0
        self.waited: set[Event] = set()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.of = self.name, self.done
        self.done += 1
        return event

    def wait_event(self, event: Event) -> None:
        self.waited.add(event)

    def wait_stream(self, other: Stream) -> None: ...
    def synchronize(self) -> None: ...


class Watched(Slot):
    """Says when it takes and gives back memory."""

    def __init__(self, nbytes: int, log: list[tuple[str, Watched]]) -> None:
        super().__init__(nbytes, CPU)
        self.log = log
        super().empty()

    @property
    def taken(self) -> int:
        return self.buffer.untyped_storage().nbytes()

    def fill(self) -> None:
        self.log.append(("fill", self))
        super().fill()

    def empty(self) -> None:
        self.log.append(("empty", self))
        super().empty()


def make_link(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaLink, Stream]:
    compute = Stream(name="compute")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    return CudaLink(CPU), compute


def test_a_fetch_waits_for_no_slot_but_the_one_whose_memory_it_takes(monkeypatch) -> None:
    """Three layers have been there at a time, so the fourth of them takes the memory of the first one released."""
    link, compute = make_link(monkeypatch)
    log: list[tuple[str, Watched]] = []
    slots = [Watched(100, log) for _ in range(6)]
    home = torch.zeros(100, dtype=torch.uint8)
    for slot in slots[:3]:
        link.fetch(slot, home)
    released: list[Event] = []
    record = compute.record_event
    monkeypatch.setattr(compute, "record_event", lambda: (released.append(record()), released[-1])[1])
    for slot in slots[:3]:
        link.release(slot)
    for i, slot in enumerate(slots[3:]):
        link.fetch(slot, home)
        assert set(released[: i + 1]) <= link._down.waited
        assert not set(released[i + 1 :]) & link._down.waited
        assert log[-2:] == [("empty", slots[i]), ("fill", slot)]


Steps = st.lists(st.tuples(st.sampled_from(["fetch", "release", "send", "flush"]), st.integers(0, 5)), max_size=60)


@given(steps=Steps, sizes=st.lists(st.integers(1, 3), min_size=6, max_size=6))
@settings(max_examples=300, deadline=None)
def test_memory_is_taken_again_behind_its_last_user(steps, sizes) -> None:
    """Whatever the order: what a slot has given back is waited for, and never is more memory held than at a time before
    by slots in use."""
    with pytest.MonkeyPatch.context() as patch:
        link, compute = make_link(patch)
        log: list[tuple[str, Watched]] = []
        slots = [Watched(100 * size, log) for size in sizes]
        held: set[Watched] = set()
        last_use: dict[Watched, list[Event]] = {slot: [] for slot in slots}
        most = 0
        record = Stream.record_event.__get__(compute)
        for what, number in steps:
            slot = slots[number]
            latest: list[Event] = []
            patch.setattr(compute, "record_event", lambda event=None, to=latest: (to.append(record(event)), to[-1])[1])
            log.clear()
            if what == "fetch" and slot not in held:
                link.fetch(slot, torch.full((slot.nbytes,), number, dtype=torch.uint8))
                held.add(slot)
                most = max(most, sum(s.nbytes for s in held))
                for user in slots:
                    if user not in held and user.taken == 0:  # its memory may be this slot's now
                        assert set(last_use[user]) <= link._down.waited
                assert set(last_use[slot]) <= link._down.waited
                assert bool((slot.buffer == number).all())
            elif what == "release" and slot in held:
                link.release(slot)
                held.discard(slot)
                last_use[slot] = latest
            elif what == "send" and slot in held:
                slot.sent = link._up.record_event()
                sent = slot.sent
                link.release(slot)
                held.discard(slot)
                last_use[slot] = [*latest, sent]
            elif what == "flush":
                link.flush()
                assert all(s.taken == 0 for s in slots if s not in held)
            assert all(s.taken == s.nbytes for s in held)
            assert sum(s.taken for s in slots) <= most


@pytest.mark.gpu
def test_a_late_fetch_runs_beside_the_computing_of_the_block_before() -> None:
    device = torch.device("cuda", 0)
    link = CudaLink(device)
    homes = [torch.full((2**26,), i, dtype=torch.uint8).pin_memory() for i in range(4)]
    slots = [Slot(2**26, device) for _ in homes]
    for slot in slots:
        slot.empty()
    for slot, home in zip(slots[:3], homes, strict=False):  # so many are there at a time
        link.fetch(slot, home)
    for slot in slots[:3]:
        link.release(slot)
    link.finish()
    torch.cuda.synchronize()
    sums, computed = [], torch.cuda.Event()
    for i in (0, 1, 2, 3, 0, 1, 2, 3):
        ticket = link.fetch(slots[i], homes[i])
        if len(sums) > 2:
            ticket.synchronize()
            assert not computed.query()  # the block before is still at it
        link.use(ticket)
        torch.cuda._sleep(10**8)
        sums.append(slots[i].buffer.sum(dtype=torch.int64))
        computed = torch.cuda.current_stream().record_event()
        link.release(slots[i])
    assert [int(x) for x in sums] == [i * 2**26 for i in (0, 1, 2, 3, 0, 1, 2, 3)]
    link.finish()
    assert all(slot.buffer.untyped_storage().nbytes() == 0 for slot in slots)


@pytest.mark.gpu
def test_no_memory_is_taken_away_under_a_running_kernel() -> None:
    """Expandable segments are unmapped when the stream that they belong to is done, whoever else still reads them."""
    device = torch.device("cuda", 0)
    use_expandable_segments()
    torch.cuda.empty_cache()
    link = CudaLink(device)
    home = torch.full((2**28,), 7, dtype=torch.uint8).pin_memory()
    slot = Slot(2**28, device)
    slot.empty()
    out = torch.empty(2**28, dtype=torch.uint8, device=device)
    link.use(link.fetch(slot, home))
    torch.cuda._sleep(10**9)
    out.copy_(slot.buffer)
    link.release(slot)
    link.flush()
    torch.cuda.empty_cache()
    other = torch.full((2**28,), 9, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    assert bool((out == 7).all())
    assert bool((other == 9).all())
