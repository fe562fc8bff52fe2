"""``LateUpdates``: parts of a step that go on in a thread after the step has returned."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_all: weakref.WeakSet[LateUpdates] = weakref.WeakSet()


class _Elsewhere:
    """A job that somebody else does."""

    def __init__(self, wait: Callable[[], None], query: Callable[[], bool]) -> None:
        self._wait, self.done = wait, query

    def exception(self) -> BaseException | None:
        self._wait()
        return None


class LateUpdates:
    """Jobs by number, done one after another in the order in which they were given, by one thread.

    A job that raises keeps its exception for whoever waits for it; the jobs behind it are done all the same.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: dict[int, Future[None] | _Elsewhere] = {}
        _all.add(self)

    def add(self, number: int, job: Callable[[], None]) -> None:
        """Adds a job behind the others, once an earlier one with its number is done. Raises: what that has raised."""
        self.wait(number)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_lowmem_late")
        self._jobs[number] = self._thread.submit(job)

    def done(self, number: int) -> bool:
        """Whether nothing with this number is left to be done."""
        job = self._jobs.get(number)
        return job is None or job.done()

    def state(self, number: int) -> str:
        """ "waiting", "running" or "done"."""
        job = self._jobs.get(number)
        if not isinstance(job, Future) or job.done():
            return "done"
        return "running" if job.running() else "waiting"

    def take(self, number: int) -> bool:
        """Takes a job away that has not begun. Returns whether there was one; it will not be done here then."""
        job = self._jobs.get(number)
        if not isinstance(job, Future) or not job.cancel():
            return False
        del self._jobs[number]
        return True

    def done_elsewhere(self, number: int, wait: Callable[[], None], query: Callable[[], bool]) -> None:
        """Says how to wait for a job that was taken, and how to ask whether it is done."""
        self._jobs[number] = _Elsewhere(wait, query)

    def wait(self, number: int | None = None) -> None:
        """Returns when the job with this number, or every one, is done. Raises: what the job has raised, once."""
        numbers = list(self._jobs) if number is None else [number]
        failed: BaseException | None = None
        for n in numbers:
            job = self._jobs.get(n)
            if job is not None:
                error = job.exception()
                del self._jobs[n]
                failed = failed or error
        if failed is not None:
            raise failed

    def _forget(self) -> None:
        """In a forked child, which has no such thread: it must not touch what the parent is writing."""
        self._thread, self._jobs = None, {}


def _forget_all() -> None:
    for late in _all:
        late._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
