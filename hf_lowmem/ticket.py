"""``Ticket``: what becomes of an operation on a store, and how it may end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from torch import Tensor

from .drive_file import without_frames
from .manifest import Extent


class StoreFailed(OSError):
    """A write or a sync has failed before, and since then nothing is done; the first error is the cause."""


class StoreClosed(RuntimeError):
    """The store has been closed."""


class StaleRead(RuntimeError):
    """The store has another version of an extent than the one that was asked for."""


class Ticket:
    """What becomes of an operation. Any thread may wait; one that is interrupted may wait again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._future: Future[None] = Future()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when it is done.

        Args:
            timeout: seconds; None waits for ever.

        Raises: what went wrong, each time it is asked; TimeoutError, and it goes on.
        """
        try:
            error = self._future.exception(timeout)
        except FutureTimeout:
            raise TimeoutError(f"{self._what} is not done within {timeout} s, and goes on") from None
        if error is not None:  # which the threads may keep
            raise without_frames(error)

    def done(self) -> bool:
        """Whether there is nothing to wait for, be it done or failed."""
        return self._future.done()

    def then(self, call: Callable[[], object]) -> None:
        """Has this called when it is done or has failed, in the store's thread: it must be quick, and wait for none."""
        self._future.add_done_callback(lambda future: call())

    def end(self, error: BaseException | None = None) -> None:
        """The keeper's: it is done."""
        if not self._future.done():
            self._future.set_result(None) if error is None else self._future.set_exception(error)


@dataclass(eq=False)
class Operation:
    """A read or a write of one extent, from its arrival to its end."""

    key: str
    extent: Extent
    writes: bool
    buffer: Tensor
    version: int | None
    ticket: Ticket
    compared: bool = False  # with its checksum, whatever the store does with other reads
    slot: int = 0
    commits: int = 0  # how many commits came before it
    begun: bool = False
    urgent: bool = False
    left: int = 0  # pieces
    sums: list[int | None] = field(default_factory=list)
    error: BaseException | None = None
