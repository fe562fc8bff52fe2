"""``DriveStates``: optimizer states that rest on a drive, and are in memory only while they are stepped.

One group of parameters is one extent. The states of the next group are read while those of one are stepped and those of
the one before are written; a read goes before a write that may wait.
"""

from __future__ import annotations

import errno
import math
import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .layer import Layer
from .state import State

CODES = ("codes", "scale")  # of a weight that exists in few bits alone: they are in its state, and lie with the weights
LEAST_BUFFERS = 3  # two groups that are stepped, for one begins before the other has ended, and one that is read ahead


class Ticket(Protocol):
    """A read or write that is under way."""

    def wait(self) -> None: ...
    def done(self) -> bool: ...


class Extents(Protocol):
    """Places on drives, by key; see ``store.Store``. A read of another version than the one written last fails."""

    def read(self, key: str, buffer: Tensor, version: int) -> Ticket: ...
    def write(self, key: str, buffer: Tensor, version: int) -> Ticket: ...
    def segments(self, key: str) -> list[tuple[Path, int, int]]: ...
    def close(self) -> None: ...


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state, without those that lie with the weights."""
    return {key: x for key, x in state.items() if isinstance(x, Tensor) and key not in CODES}


def layer_of(states: Iterable[Mapping[str, Any]]) -> Layer:
    """How the tensors of some states lie in one extent."""
    return Layer.of([(f"{i} {key}", x) for i, state in enumerate(states) for key, x in tensors_of(state).items()])


class DriveStates:
    """The states of groups of parameters on drives.

    A state that rests there keeps its names, with tensors on the "meta" device, of which torch says that they have no
    data; ``open`` gives the real ones.

    Args:
        make: takes the bytes of each extent, by key, and makes their places. Bytes are multiples of 4096.
        buffer: makes memory of so many bytes, aligned to a page.
        buffers: so many of them, each for the largest group; 3 or more.
    """

    def __init__(
        self, make: Callable[[Mapping[str, int]], Extents], buffer: Callable[[int], Tensor], buffers: int = 4
    ) -> None:
        if buffers < LEAST_BUFFERS:
            raise ValueError(f"buffers={buffers}: states are read ahead and written behind, which takes 3 or more")
        self._make, self._buffer, self._buffers = make, buffer, buffers
        self._layers: dict[int, Layer] = {}
        self._welcome: set[int] = set()
        self._places: list[Extents] = []
        self._extents: dict[int, Extents] = {}  # those that a group is in
        self._free: list[Tensor] = []
        self._lock = threading.Condition()
        self._resting: dict[int, dict[Tensor, dict[str, Tensor]]] = {}  # what stands in for each state's tensors
        self._versions: dict[int, int] = {}  # writes of each group so far
        self._open: dict[int, Tensor] = {}
        self._coming: tuple[int, Tensor, Ticket] | None = None
        self._writing: deque[tuple[Tensor, Ticket]] = deque()
        self._queue: deque[int] = deque()
        self._failure = ""

    def take_in(self, layers: Mapping[int, Layer]) -> None:
        """Says which groups are to rest here from now on. Places of others stay theirs, should they come back.

        Only while nothing is under way.

        Args:
            layers: how the states of each group lie in its extent, by number.

        Raises: what making places does; then nothing has changed.
        """
        fresh = {number: layer for number, layer in layers.items() if self._layers.get(number) != layer}
        if fresh:
            self.synchronize()
            self._drop_what_came()
            places = self._make({str(number): layer.nbytes for number, layer in fresh.items()})
            self._places.append(places)
            self._layers.update(fresh)
            self._extents.update(dict.fromkeys(fresh, places))
            self._versions.update(dict.fromkeys(fresh, 0))
            size = max(layer.nbytes for layer in self._layers.values())
            if not self._free or self._free[0].numel() < size:
                self._free.clear()
                self._free += [self._buffer(size) for _ in range(self._buffers)]
        self._welcome = set(layers)

    def _drop_what_came(self) -> None:
        with self._lock:
            self._queue.clear()
            coming, self._coming = self._coming, None
        if coming is not None:
            self._wait(*coming[1:])

    def __contains__(self, number: int) -> bool:
        """Whether a group is to rest here."""
        return number in self._welcome

    def holds(self, number: int, states: Mapping[Tensor, State]) -> bool:
        """Whether the states of a group, by parameter, are those that rest here."""
        found = self._resting.get(number)
        return (
            found is not None
            and found.keys() == states.keys()
            and all(
                tensors_of(states[p]).keys() == ours.keys() and all(states[p][key] is x for key, x in ours.items())
                for p, ours in found.items()
            )
        )

    def put(self, number: int, states: Mapping[Tensor, State]) -> bool:
        """Writes the states of a group, whose tensors are on the drive from here on.

        Returns: whether they fit its extent, which is made for one kind of states; if not, they stay where they are.
        """
        layer, held = self._layers[number], [tensors_of(state) for state in states.values()]
        if layer_of(states.values()) != layer or any(not x.is_cpu for tensors in held for x in tensors.values()):
            return False
        buffer = self._take()
        for view, x in zip(layer.views(buffer), (x for tensors in held for x in tensors.values()), strict=True):
            view.copy_(x)
        self._write(number, buffer)
        stand_ins = [{key: torch.empty_like(x, device="meta") for key, x in tensors.items()} for tensors in held]
        for state, tensors in zip(states.values(), stand_ins, strict=True):
            state.update(tensors)
        self._resting[number] = dict(zip(states, stand_ins, strict=True))
        return True

    def enqueue(self, number: int) -> None:
        """Says that a group will be opened, behind those said before, so that it is read ahead."""
        with self._lock:
            self._queue.append(number)
        self._read_ahead()

    def open(self, number: int) -> dict[Tensor, dict[str, Tensor]]:
        """The tensors of a group's states, by parameter, to be changed; ``close`` must follow. Any thread may.

        Raises: what has gone wrong in reading them; RuntimeError after an earlier failure: they are of several steps.
        """
        self._check()
        with self._lock:
            coming = self._coming if self._coming is not None and self._coming[0] == number else None
            if coming is not None:
                self._coming = None
            if number in self._queue:
                self._queue.remove(number)
        buffer = self._take() if coming is None else coming[1]
        try:
            ticket = self._read(number, buffer) if coming is None else coming[2]
            self._read_ahead()
            ticket.wait()
        except BaseException as error:
            self._remember(error)
            self._give_back(buffer)
            raise
        with self._lock:
            self._open[number] = buffer
        views = iter(self._layers[number].views(buffer))
        return {p: {key: next(views) for key in tensors} for p, tensors in self._resting[number].items()}

    def close(self, number: int, changed: bool = True) -> None:
        """Ends what ``open`` has begun: what was changed is written, without waiting for it."""
        with self._lock:
            buffer = self._open.pop(number)
        if changed:
            self._write(number, buffer)
        else:
            self._give_back(buffer)

    def copies(self, number: int) -> dict[Tensor, dict[str, Tensor]]:
        """The tensors of a group's states in memory of their own, by parameter."""
        found = self.open(number)
        try:
            return {p: {key: x.clone() for key, x in tensors.items()} for p, tensors in found.items()}
        finally:
            self.close(number, changed=False)

    def seen(self, number: int) -> dict[Tensor, dict[str, Tensor]]:
        """The tensors of a group's states, by parameter, for somebody who reads them: views of the files, which take no
        RAM but the system's cache. Writing to them changes nothing there. What lies on two drives is a copy.

        Only while nothing is written. On other systems than Linux, where files that are written past the cache are not
        seen so, all are copies.

        Raises: OSError naming the file that is gone or cut; RuntimeError after an earlier failure.
        """
        self._check()
        if sys.platform != "linux":
            return self.copies(number)
        maps, start = [], 0
        for path, offset, nbytes in self._extents[number].segments(str(number)):
            if nbytes:
                maps.append((start, start + nbytes, _mapped(path, offset, nbytes)))
            start += nbytes
        specs, copies, found = iter(self._layers[number].specs), None, {}
        for p, tensors in self._resting[number].items():
            views = {}
            for key in tensors:
                spec = next(specs)
                end = spec.offset + spec.nbytes
                inside = next((m for m in maps if m[0] <= spec.offset and end <= m[1]), None)
                if inside is not None and spec.nbytes:
                    at, count = spec.offset - inside[0], math.prod(spec.shape)
                    view = torch.frombuffer(inside[2], dtype=spec.dtype, count=count, offset=at)
                    views[key] = view.view(spec.shape)
                else:
                    copies = copies or self.copies(number)
                    views[key] = copies[p][key]
            found[p] = views
        return found

    def bring(self, number: int, states: Mapping[Tensor, State]) -> None:
        """Has the states of a group be ordinary ones in memory again, as far as they rest here."""
        for p, tensors in self.with_data(number, states, self.copies).items():
            states[p].update(tensors)
        self._resting.pop(number, None)

    def with_data(
        self, number: int, states: Mapping[Tensor, State], read: Callable[[int], dict[Tensor, dict[str, Tensor]]]
    ) -> dict[Tensor, dict[str, Tensor]]:
        """The tensors of those states that rest here, though others of their group may not any more.

        Args:
            read: ``copies`` or ``seen``.
        """
        ours = self._resting.get(number, {})
        keys = {p: [k for k, x in ours[p].items() if states[p].get(k) is x] for p in ours if p in states}
        found = read(number) if any(keys.values()) else {}
        return {p: {key: found[p][key] for key in names} for p, names in keys.items() if names}

    def forget(self) -> None:
        """Of all groups: their states have been replaced."""
        self._resting.clear()

    def synchronize(self) -> None:
        """Returns when all that was changed is on the drives. Raises: what has gone wrong in writing it."""
        while True:
            with self._lock:
                if not self._writing:
                    break
                buffer, ticket = self._writing.popleft()
            self._wait(buffer, ticket)
        self._check()

    def end(self) -> None:
        """Gives the drives' places back; nothing may rest there any more."""
        self.synchronize()
        for places in self._places:
            places.close()

    # -- buffers ----------------------------------------------------------------------------------------------------
    def _part(self, number: int, buffer: Tensor) -> Tensor:
        return buffer[: self._layers[number].nbytes]

    def _read(self, number: int, buffer: Tensor) -> Ticket:
        return self._extents[number].read(str(number), self._part(number, buffer), self._versions[number])

    def _take(self) -> Tensor:
        """A free buffer; waits for the earliest write, or for who has one."""
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
                if not self._writing:
                    self._lock.wait()
                    continue
                buffer, ticket = self._writing.popleft()
            self._wait(buffer, ticket)

    def _wait(self, buffer: Tensor, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except BaseException as error:
            self._remember(error)
            raise
        finally:
            self._give_back(buffer)

    def _remember(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # Ctrl-C ends no read or write
            self._failure = self._failure or f"{type(error).__name__}: {error}"

    def _check(self) -> None:
        if self._failure:
            raise RuntimeError(
                "optimizer states rest on a drive that has failed, and are of several steps: resume from a checkpoint. "
                f"What went wrong first: {self._failure}"
            )

    def _give_back(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.append(buffer)
            self._lock.notify()

    def _write(self, number: int, buffer: Tensor) -> None:
        try:
            self._versions[number] += 1
            ticket = self._extents[number].write(str(number), self._part(number, buffer), self._versions[number])
        except BaseException as error:
            self._remember(error)
            self._give_back(buffer)
            raise
        with self._lock:
            self._writing.append((buffer, ticket))
            self._lock.notify()
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Starts to read the next group, if none is on its way and a buffer can be had without waiting."""
        with self._lock:
            while self._writing and self._writing[0][1].done():
                buffer, ticket = self._writing.popleft()
                self._wait(buffer, ticket)
            if self._coming is not None or not self._queue or not self._free:
                return
            number, buffer = self._queue.popleft(), self._free.pop()
            try:
                self._coming = number, buffer, self._read(number, buffer)
            except BaseException:
                self._free.append(buffer)
                self._queue.appendleft(number)
                raise


def _mapped(path: Path, offset: int, nbytes: int) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=offset)
    except (OSError, ValueError) as error:  # ValueError: it is shorter
        found = path.stat().st_size if path.exists() else None
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"{path}: wanted {nbytes} bytes at offset {offset} of optimizer states, "
            f"{'the file is gone' if found is None else f'the file has {found}'}: resume from a checkpoint",
        ) from error


def grouped(params: Iterable[Tensor], groups: Mapping[Tensor, int]) -> dict[int | None, list[Tensor]]:
    """Parameters by the number of their group, None for those without."""
    found: dict[int | None, list[Tensor]] = {}
    for p in params:
        found.setdefault(groups.get(p), []).append(p)
    return found
