"""How bytes get to a device and back while it computes: a ``Link``. One for CUDA, one for a "device" in host memory."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

TIMED = 2**20  # bytes of a copy that says how fast the link is
RECENT = 8  # copies: one that the CPU was kept from issuing says nothing, so the fastest of these counts
ALIGN = 256  # of what lies in one buffer


class Slot:
    """A device's copy of one layer's bytes: a buffer whose memory comes and goes.

    It has memory at first, for views of it to be made. They stay valid when it goes and comes back, also those that
    autograd has saved: they share its storage.

    Args:
        nbytes: bytes of the layer.
        device: where it is.
        debug: keep the memory and fill it with NaN where it would be given back, so that a late reader shows.
    """

    def __init__(self, nbytes: int, device: torch.device, debug: bool = False) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.sent: Any = None  # the latest copy from it
        self.nbytes, self.debug = nbytes, debug

    def fill(self) -> None:
        """Takes memory, if it has none. Its contents are undefined."""
        if not self.debug:
            self.buffer.untyped_storage().resize_(self.nbytes)

    def empty(self) -> None:
        """Gives its memory back."""
        if self.debug:
            self.buffer.fill_(0xFF)  # a NaN in every float format
        else:
            self.buffer.untyped_storage().resize_(0)


class Link(Protocol):
    """Copies between homes and slots, in their own time; see ``CudaLink``."""

    device: torch.device
    bags: int  # so many parts of what travels with a layer have memory of the device

    def fetch(self, slot: Slot, home: Tensor) -> Any: ...
    def begin(self, slot: Slot, home: Tensor, nbytes: int) -> None: ...
    def update(self, part: Part) -> None: ...
    def end(self, slot: Slot, home: Tensor) -> tuple[Any, Any]: ...
    def reserve(self, nbytes: int) -> None: ...
    def use(self, ticket: Any) -> None: ...
    def release(self, slot: Slot) -> None: ...
    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], slot: Slot | None = None) -> Any: ...
    def arrived(self, sent: Any) -> None: ...
    def has_arrived(self, sent: Any) -> bool: ...
    def finish(self) -> None: ...
    def flush(self) -> None: ...
    def seconds(self, nbytes: int) -> float: ...


# Bytes in host memory that an update changes, bytes that it reads, and the update: it takes copies of both, changes the
# first and the slot, in the current stream.
Part = tuple[Tensor, Tensor, Callable[[Tensor, Tensor], None]]


class _Bag:
    """Memory of a device for what travels with a layer's weights: one part of it."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.sent: torch.cuda.Event | None = None  # the copy home of what was in it last

    @property
    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.numel()

    def parts(self, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Tensors of these numbers of bytes."""
        offsets = [0, *itertools.accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        if self.buffer is None or self.nbytes < offsets[-1]:
            self.buffer = None
            self.buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=device)
        return [self.buffer[start : start + size] for start, size in zip(offsets, sizes, strict=False)]


class CudaLink:
    """Streams beside the one that computes: one for copies down to the GPU, one for copies up, one for updates.

    The memory of slots belongs to the down stream: it is taken and given back in that stream's order, which waits for
    whoever used the slot last. So no slot is overwritten too early, however far the CPU runs ahead of the GPU, and the
    memory of a few slots serves all layers.

    [Note: whose memory a fetch takes] That of the slot that was released first. Were all that is released given back at
    once, a fetch would wait for the computing of the very block before it, wherever the CPU is late with its update.

    Args:
        device: a CUDA device.
        kept: so many copies up may be under way with their gradients kept for them; then the GPU waits for the first.
    """

    def __init__(self, device: torch.device, kept: int = 1) -> None:
        self.device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        self.bags = 2  # one is filled while the other is updated and sent home, which is less
        self._bags = deque(_Bag() for _ in range(self.bags))
        self._held: set[Slot] = set()  # fetched, and not released
        self._most = 0  # bytes of these at a time
        self._released: deque[tuple[Slot, list[torch.cuda.Event]]] = deque()  # with their memory, the first one first
        self._paces: deque[float] = deque(maxlen=RECENT)  # seconds a byte of copies down
        self._coming: deque[tuple[torch.cuda.Event | None, torch.cuda.Event, int]] = deque()  # copies down, their bytes
        self._sent: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._kept = kept

    def fetch(self, slot: Slot, home: Tensor) -> torch.cuda.Event:
        """Starts a copy down, after all that has been released so far. Returns what ``use`` takes."""
        self._make_room(slot)
        with torch.cuda.stream(self._down):
            slot.fill()
            self._held.add(slot)
            self._most = max(self._most, sum(held.nbytes for held in self._held))
            start = self._down.record_event(torch.cuda.Event(enable_timing=True)) if home.numel() >= TIMED else None
            slot.buffer.copy_(home, non_blocking=True)
        end = self._down.record_event(torch.cuda.Event(enable_timing=start is not None))
        self._coming.append((start, end, home.numel()))
        self._collect()
        return end

    def begin(self, slot: Slot, home: Tensor, nbytes: int) -> None:
        """Starts a copy down of a layer that is to be updated, and takes the memory for parts of so many bytes.

        Args:
            slot, home: of the layer.
            nbytes: of the largest part's state and gradient.
        """
        self.reserve(nbytes)
        self.fetch(slot, home)

    def update(self, part: Part) -> None:
        """Starts the copy down of what travels with a layer, one part of it, the update, and the copy home."""
        state, grad, step = part
        bag = self._bags[0]
        self._bags.rotate(-1)
        if bag.sent is not None:
            self._down.wait_event(bag.sent)
        with torch.cuda.stream(self._down):
            there = bag.parts([state.numel(), grad.numel()], self.device)
            for copy, source in zip(there, (state, grad), strict=True):
                copy.copy_(source, non_blocking=True)
        self._coming.append((None, self._down.record_event(), state.numel() + grad.numel()))
        self._side.wait_stream(self._down)
        with torch.cuda.stream(self._side):
            step(*there)
        self._up.wait_stream(self._side)
        with torch.cuda.stream(self._up):
            state.copy_(there[0], non_blocking=True)
        bag.sent = self._up.record_event()

    def end(self, slot: Slot, home: Tensor) -> tuple[Any, Any]:
        """Starts the copy home of an updated layer. Returns: what ``use`` takes, and what ``arrived`` takes."""
        self._side.wait_stream(self._down)
        updated = self._side.record_event()
        self._up.wait_event(updated)
        with torch.cuda.stream(self._up):
            home.copy_(slot.buffer, non_blocking=True)
        slot.sent = self._up.record_event()
        return updated, slot.sent

    def reserve(self, nbytes: int) -> None:
        """Takes the memory of the device that is needed for parts of so many bytes."""
        if all(bag.nbytes >= nbytes for bag in self._bags):
            return
        with torch.cuda.stream(self._down):
            for bag in self._bags:
                if bag.sent is not None and bag.nbytes < nbytes:  # its memory is given back, in this stream's order
                    self._down.wait_event(bag.sent)
                bag.parts([nbytes], self.device)

    def use(self, ticket: torch.cuda.Event) -> None:
        """Makes the computing stream wait for a fetch. The CPU does not wait."""
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def release(self, slot: Slot) -> None:
        """Gives a slot's memory back, once the computing stream has done what it has been given so far."""
        self._give_back(slot, torch.cuda.current_stream(self.device).record_event())

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], slot: Slot | None = None) -> torch.cuda.Event:
        """Starts copies up, once the computing stream has done what it has been given so far.

        Args:
            pairs: (home, source on the GPU) of each copy. The sources are kept as long as they are needed.
            slot: given back after the copies, where the sources lie in one.

        Returns: what ``arrived`` takes.
        """
        compute = torch.cuda.current_stream(self.device)
        self._up.wait_stream(compute)
        with torch.cuda.stream(self._up):
            for home, source in pairs:
                home.copy_(source, non_blocking=True)
        done = self._up.record_event()
        if slot is not None:
            self._give_back(slot, done)
        self._sent.append((done, [source for _, source in pairs]))
        while self._sent and (len(self._sent) > self._kept or self._sent[0][0].query()):
            compute.wait_event(self._sent[0][0])  # their memory is the computing stream's again
            self._sent.popleft()
        return done

    def arrived(self, sent: torch.cuda.Event) -> None:
        """The CPU waits for what has been sent. Any thread may ask."""
        sent.synchronize()

    def has_arrived(self, sent: torch.cuda.Event) -> bool:
        """Whether it is there already."""
        return sent.query()

    def finish(self) -> None:
        """The CPU waits until all that was sent has come home."""
        self._up.synchronize()
        self._sent.clear()
        self.flush()

    def flush(self) -> None:
        """Gives back the memory of all slots that have been released."""
        while self._released:
            self._empty(0)

    def seconds(self, nbytes: int) -> float:
        """How long it will be until so many more bytes are down, behind all that is coming; 0 before it is measured."""
        self._collect()
        return (nbytes + sum(size for *_, size in self._coming)) * min(self._paces, default=0.0)

    def _collect(self) -> None:
        while self._coming and self._coming[0][1].query():
            start, end, size = self._coming.popleft()
            if start is not None:
                self._paces.append(start.elapsed_time(end) / 1e3 / size)

    def _make_room(self, slot: Slot) -> None:
        """Gives back the memory of released slots, until there is as little as when most were held."""
        for i, (released, _) in enumerate(self._released):
            if released is slot:
                self._empty(i)  # it is taken again at once
                return
        taken = [*self._held, *(released for released, _ in self._released), slot]
        over = sum(s.nbytes for s in taken) - self._most
        while over > 0 and self._released:
            over -= self._released[0][0].nbytes
            self._empty(0)

    def _empty(self, number: int) -> None:
        slot, events = self._released[number]
        del self._released[number]
        for event in events:  # before the memory is free: the allocator may take it away when this stream is done
            self._down.wait_event(event)
        with torch.cuda.stream(self._down):
            slot.empty()

    def _give_back(self, slot: Slot, done: torch.cuda.Event) -> None:
        events = [done] if slot.sent is None else [done, slot.sent]
        slot.sent = None
        self._held.discard(slot)
        self._released.append((slot, events))
        if slot.debug:
            self._empty(len(self._released) - 1)


class HostLink:
    """The same between two places in host memory: at once, for machines without a GPU."""

    def __init__(self) -> None:
        self.device, self.bags = torch.device("cpu"), 0

    def fetch(self, slot: Slot, home: Tensor) -> None:
        slot.fill()
        slot.buffer.copy_(home)

    def begin(self, slot: Slot, home: Tensor, nbytes: int) -> None:
        self.fetch(slot, home)

    def update(self, part: Part) -> None:
        state, grad, step = part
        copy = state.clone()
        step(copy, grad.clone())
        state.copy_(copy)

    def end(self, slot: Slot, home: Tensor) -> tuple[None, None]:
        home.copy_(slot.buffer)
        return None, None

    def reserve(self, nbytes: int) -> None: ...

    def use(self, ticket: None) -> None: ...

    def release(self, slot: Slot) -> None:
        slot.empty()

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], slot: Slot | None = None) -> None:
        for home, source in pairs:
            home.copy_(source)
        if slot is not None:
            slot.empty()

    def arrived(self, sent: None) -> None: ...

    def has_arrived(self, sent: None) -> bool:
        return True

    def finish(self) -> None: ...

    def flush(self) -> None: ...

    def seconds(self, nbytes: int) -> float:
        return 0.0
