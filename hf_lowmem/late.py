"""``LateUpdates``: parts of a step that go on in a thread after the step has returned."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

Job = Callable[[Callable[[], None]], object]

_all: weakref.WeakSet[LateUpdates] = weakref.WeakSet()


class _Elsewhere:
    """A job that somebody else does."""

    def __init__(self, wait: Callable[[], None], query: Callable[[], bool]) -> None:
        self._wait, self.done = wait, query

    def exception(self) -> BaseException | None:
        self._wait()
        return None


@dataclass(eq=False)
class _Waiting:
    """A job that has not begun, as far as is known: Ctrl-C may strike where it has just been given to a thread.

    Args:
        claimed: whether somebody is doing it, or has taken it away.
    """

    job: Job
    future: Future[None] = field(default_factory=Future)
    claimed: bool = False


class LateUpdates:
    """Jobs by number, begun one after another in the order in which they were given.

    A job is called with ``ending``, which it may call when it has begun to end: then the next one begins. So the cores
    that a job's last pieces leave idle are at work for the next.

    A job that raises keeps its exception for whoever waits for it; the jobs behind it are done all the same.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: dict[int, Future[None] | _Elsewhere] = {}
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._busy = False  # a job has begun, and has not begun to end
        _all.add(self)

    def add(self, number: int, job: Job) -> None:
        """Adds a job behind the others, once an earlier one with its number is done. Raises: what that has raised."""
        self.wait(number)
        waiting = _Waiting(job)
        with self._lock:
            self._jobs[number] = waiting.future
            self._waiting[number] = waiting
            self._begin_next()

    def _begin_next(self) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="hf_lowmem_late")  # one ends, one begins
        while self._waiting and not self._busy:
            number = next(iter(self._waiting))
            waiting = self._waiting[number]
            try:
                self._busy = True
                self._threads.submit(self._do, waiting)
            except RuntimeError as error:  # the interpreter is going
                self._busy = False
                waiting.future.set_exception(error)
            except BaseException:  # Ctrl-C: whoever waits for it begins it
                self._busy = False
                raise
            del self._waiting[number]

    def _claim(self, waiting: _Waiting) -> bool:
        claimed, waiting.claimed = waiting.claimed, True
        return not claimed

    def _do(self, waiting: _Waiting) -> None:
        mine, future = True, waiting.future

        def ending() -> None:
            nonlocal mine
            with self._lock:
                if mine:
                    mine = self._busy = False
                    self._begin_next()

        with self._lock:
            claimed = self._claim(waiting)
        if not claimed:
            ending()
            return
        try:
            waiting.job(ending)
        except BaseException as error:
            ending()
            future.set_exception(error)
        else:
            ending()
            future.set_result(None)

    def done(self, number: int) -> bool:
        """Whether nothing with this number is left to be done."""
        job = self._jobs.get(number)
        return job is None or job.done()

    def state(self, number: int) -> str:
        """ "waiting", "running" or "done"."""
        with self._lock:
            if number in self._waiting:
                return "waiting"
        job = self._jobs.get(number)
        return "running" if isinstance(job, Future) and not job.done() else "done"

    def take(self, number: int) -> bool:
        """Takes a job away that has not begun. Returns whether there was one; it will not be done here then."""
        with self._lock:
            waiting = self._waiting.pop(number, None)
            if waiting is None or not self._claim(waiting):
                return False
            del self._jobs[number]
            return True

    def hurry(self, number: int) -> None:
        """Puts a job that is waiting before the others."""
        with self._lock:
            if number in self._waiting:
                self._waiting = {number: self._waiting[number], **self._waiting}

    def done_elsewhere(self, number: int, wait: Callable[[], None], query: Callable[[], bool]) -> None:
        """Says how to wait for a job that was taken, and how to ask whether it is done."""
        self._jobs[number] = _Elsewhere(wait, query)

    def wait(self, number: int | None = None) -> None:
        """Returns when the job with this number, or every one, is done. Raises: what the job has raised, once."""
        with self._lock:
            self._begin_next()
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
        self._threads, self._jobs = None, {}
        self._lock, self._waiting, self._busy = threading.Lock(), {}, False


def _forget_all() -> None:
    for late in _all:
        late._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
