"""``Drive``: a store's file on one drive, and the threads that read and write it."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .drive_file import DriveError, DriveFile

Done = Callable[["Job", "BaseException | None"], None]


class CorruptRead(DriveError):
    """What was read is not what had been written there: its checksum is another."""


@dataclass(eq=False)
class Job:
    """Something that a drive's thread does.

    Args:
        done: called in that thread with the job and what it has raised.
    """

    done: Done

    def run(self, drive: Drive) -> None:
        """Raises: anything; ``done`` gets it."""
        raise NotImplementedError


@dataclass(eq=False)
class Errand(Job):
    """A call that takes its time, such as a sync."""

    call: Callable[[], object]

    def run(self, drive: Drive) -> None:
        self.call()


@dataclass(eq=False)
class Transfer(Job):
    """One piece of an extent.

    Args:
        owner: whose piece it is.
        number: of the piece within the extent.
        writes: or reads.
        offset: in the drive's file, in bytes.
        buffer: the bytes.
        hasher: takes a checksum of bytes; None where none is wanted.
        sum: the checksum that what is read must have; of what was written, once it is.
    """

    owner: object
    number: int
    writes: bool
    offset: int
    buffer: memoryview
    hasher: Callable[[memoryview], int] | None = None
    sum: int | None = None

    def run(self, drive: Drive) -> None:
        if self.writes:
            if self.hasher is not None:
                self.sum = self.hasher(self.buffer)
            drive.file.write(self.offset, self.buffer)
            return
        try:
            self._read(drive.file)
        except OSError:  # once more: a passing fault of a cable or a bus costs no training
            drive.count_retry()
            self._read(drive.file)

    def _read(self, file: DriveFile) -> None:
        file.read(self.offset, self.buffer)
        if self.hasher is not None and self.sum is not None:
            found, n = self.hasher(self.buffer), len(self.buffer)
            if found != self.sum:
                raise CorruptRead(
                    errno.EIO,
                    f"reading {file.path}: wanted {n} bytes at offset {self.offset}, got {n} of which some have "
                    f"changed since they were written (checksum {found:#018x}, not {self.sum:#018x}). The drive or its "
                    "connection is failing: resume from the last checkpoint, on another drive.",
                    file.path,
                    self.offset,
                    n,
                    n,
                )


@dataclass
class Traffic:
    """What a drive has done so far.

    Args:
        bytes_read, bytes_written: bytes.
        read_s, write_s: seconds that threads were busy with it, of all of them together.
        cpu_s: seconds of CPU time of these threads.
        retries: reads that were tried once more.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    cpu_s: float = 0.0
    retries: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(eq=False)
class Drive:
    """One file and its threads. What is urgent goes before what is not, and otherwise the first before the next.

    Args:
        file: open; this closes it.
        threads: that read and write it.
        name: of these threads.

    Attributes:
        traffic: see ``Traffic``.
    """

    file: DriveFile
    threads: int
    name: str
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{self.name}.{i}", daemon=True) for i in range(self.threads)
        ]

    def start(self) -> None:
        """Starts the threads. Raises: RuntimeError if the system gives none; those that have begun are stopped."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.stop(None)
            raise

    def put(self, job: Job, urgent: bool) -> None:
        """Adds a job behind others of its kind."""
        with self._changed:
            (self._urgent if urgent else self._others).append(job)
            self._changed.notify()

    def hurry(self, owner: object) -> None:
        """Puts the pieces of one owner behind what is urgent, before all that is not."""
        with self._changed:
            chosen = [job for job in self._others if isinstance(job, Transfer) and job.owner is owner]
            if chosen:
                self._others = deque(job for job in self._others if job not in chosen)
                self._urgent.extend(chosen)

    def clear(self) -> list[Job]:
        """Takes away, and returns, all that has not begun."""
        with self._changed:
            jobs = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
            return jobs

    def stop(self, timeout: float | None) -> bool:
        """Has the threads end when what they do is done. Returns whether they have, within some seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        end = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def count_retry(self) -> None:
        """A read is tried once more."""
        with self._changed:
            self.traffic.retries += 1

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._urgent or self._others)
            if self._urgent or self._others:
                return (self._urgent or self._others).popleft()
            return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            started, cpu, error = time.perf_counter(), time.thread_time(), None
            try:
                job.run(self)
            except BaseException as raised:
                error = raised
            self._count(job, time.perf_counter() - started, time.thread_time() - cpu, error is None)
            job.done(job, error)
            del job, error  # its buffer is the caller's again

    def _count(self, job: Job, seconds: float, cpu: float, whole: bool) -> None:
        with self._changed:
            self.traffic.cpu_s += cpu
            if isinstance(job, Transfer):
                nbytes = len(job.buffer) if whole else 0
                if job.writes:
                    self.traffic.bytes_written += nbytes
                    self.traffic.write_s += seconds
                else:
                    self.traffic.bytes_read += nbytes
                    self.traffic.read_s += seconds
