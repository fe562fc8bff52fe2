"""How bytes get to a device and back while it computes: a ``Link``. One for CUDA, one for a "device" in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


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
        self._nbytes, self.debug = nbytes, debug

    def fill(self) -> None:
        """Takes memory, if it has none. Its contents are undefined."""
        if not self.debug:
            self.buffer.untyped_storage().resize_(self._nbytes)

    def empty(self) -> None:
        """Gives its memory back."""
        if self.debug:
            self.buffer.fill_(0xFF)  # a NaN in every float format
        else:
            self.buffer.untyped_storage().resize_(0)


class Link(Protocol):
    """Copies between homes and slots, in their own time; see ``CudaLink``."""

    device: torch.device

    def fetch(self, slot: Slot, home: Tensor) -> Any: ...
    def use(self, ticket: Any) -> None: ...
    def release(self, slot: Slot) -> None: ...
    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], slot: Slot | None = None) -> Any: ...
    def arrived(self, sent: Any) -> None: ...
    def finish(self) -> None: ...


class CudaLink:
    """Two streams beside the one that computes: one for copies down to the GPU, one for copies up.

    The memory of slots belongs to the down stream: it is taken and given back in that stream's order, which waits for
    whoever used the slot last. So no slot is overwritten too early, however far the CPU runs ahead of the GPU, and the
    memory of a few slots serves all layers.

    Args:
        device: a CUDA device.
        kept: so many copies up may be under way with their gradients kept for them; then the GPU waits for the first.
    """

    def __init__(self, device: torch.device, kept: int = 2) -> None:
        self.device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._freed: list[torch.cuda.Event] = []
        self._sent: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._kept = kept

    def fetch(self, slot: Slot, home: Tensor) -> torch.cuda.Event:
        """Starts a copy down, after all that has been released so far. Returns what ``use`` takes."""
        for event in self._freed:
            self._down.wait_event(event)
        self._freed.clear()
        with torch.cuda.stream(self._down):
            slot.fill()
            slot.buffer.copy_(home, non_blocking=True)
        return self._down.record_event()

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

    def finish(self) -> None:
        """The CPU waits until all that was sent has come home."""
        self._up.synchronize()
        self._sent.clear()

    def _give_back(self, slot: Slot, done: torch.cuda.Event) -> None:
        if slot.debug:  # it is written, not only given back
            self._down.wait_event(done)
        else:
            self._freed.append(done)
        with torch.cuda.stream(self._down):
            slot.empty()


class HostLink:
    """The same between two places in host memory: at once, for machines without a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def fetch(self, slot: Slot, home: Tensor) -> None:
        slot.fill()
        slot.buffer.copy_(home)

    def use(self, ticket: None) -> None: ...

    def release(self, slot: Slot) -> None:
        slot.empty()

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], slot: Slot | None = None) -> None:
        for home, source in pairs:
            home.copy_(source)
        if slot is not None:
            slot.empty()

    def arrived(self, sent: None) -> None: ...

    def finish(self) -> None: ...
