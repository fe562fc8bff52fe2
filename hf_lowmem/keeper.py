"""``Keeper``: the one thread that knows what is where in a store, and in which order things are done.

[Note: one thread] All that changes is the keeper's alone: others put calls into its queue, in one step that no
interrupt cuts, and wait for tickets. So Ctrl-C loses no write, no lock can be held when it strikes, and a drive's
thread waits for nobody.

[Note: order] Operations on one key are done in the order in which they came: reads together, a write alone. Reads go
before writes of other keys; a write that a read waits for goes with the reads. A commit lets all writes before it end,
and holds those after it back until it is published: these go to the slot that the committed step does not need.

[Note: failure] After a write or a sync that has failed nobody knows what is on the drive. So the first such error ends
everything: what has not begun, and all that comes later, is refused with it as the cause. A read that fails harms none.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from .buffers import as_memory
from .drive import Drive, Errand, Job, Transfer
from .drive_file import DriveError, without_frames
from .folders import RunFolder, remove
from .manifest import Manifest, Place
from .ticket import Operation, StaleRead, StoreClosed, StoreFailed, Ticket

PATIENCE = 20.0  # seconds that closing waits for a drive

living: weakref.WeakSet[Keeper] = weakref.WeakSet()


@dataclass(eq=False)
class Commit:
    """A step that is being made the last whole one."""

    step: int
    number: int  # how many came before it
    ticket: Ticket
    left: int = -1  # drives that have yet to sync; -1 before that


class Keeper:
    """See the module. Its methods without an underscore may be called by any thread.

    Args:
        drives: with their threads running.
        folders: one for each, removed at the end.
        manifest: as it was published last.
        hasher: takes checksums; None for none.
        checks: "off": no read is compared with its checksum; "old": those of what was there at the beginning; "all".
    """

    def __init__(
        self,
        drives: Sequence[Drive],
        folders: Sequence[RunFolder],
        manifest: Manifest,
        hasher: Callable[[memoryview], int] | None,
        checks: str,
    ) -> None:
        self.drives, self.folders, self.manifest = drives, folders, manifest
        self.failed: BaseException | None = None
        self.closing = False
        self.left_behind: list[str] = []  # what could not be removed, and why
        self.pid = os.getpid()
        self.hasher, self._checks = hasher, checks
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ended = threading.Event()
        self._closed = Ticket("closing the store")
        self._places = dict(manifest.places)
        self._committed = {key: place.slot for key, place in manifest.places.items()}
        self._old = set(manifest.places) if checks == "old" else set()
        self._queues: dict[str, deque[Operation]] = {key: deque() for key in manifest.extents}
        self._unfinished: dict[Operation, None] = {}
        self._drains: list[tuple[Ticket, set[Operation]]] = []
        self._commits: deque[Commit] = deque()
        self._came = 0  # commits so far
        self._untouched = manifest.slots == 1 and manifest.step is not None and not manifest.dirty
        self._marking = False
        self._thread = threading.Thread(target=self._work, name="hf_lowmem_store", daemon=True)
        self._thread.start()
        living.add(self)

    # What others call.

    def submit(self, operation: Operation) -> None:
        """Does a read or a write in its turn."""
        self._post(partial(self._accept, operation))

    def drain(self) -> Ticket:
        """Done when all operations that came before are."""
        ticket = Ticket("draining the store")
        self._post(partial(self._drain, ticket))
        return ticket

    def commit(self, step: int) -> Ticket:
        """Done when all that was written before will be there after a crash, as this step."""
        ticket = Ticket(f"committing step {step}")
        self._post(partial(self._commit, step, ticket))
        return ticket

    def close(self, keep: bool) -> Ticket:
        """Done when threads, files and, unless they are kept, folders are gone. What has not begun is dropped."""
        self._post(partial(self._close, keep))
        return self._closed

    def refusal(self) -> BaseException | None:
        """Why nothing is done any more, if so."""
        if self.pid != os.getpid():
            return RuntimeError("this store is another process's: its threads do not survive a fork; make one here")
        if self.failed is not None:
            error = StoreFailed(getattr(self.failed, "errno", None) or 5, f"nothing is done since: {self.failed}")
            error.__cause__ = self.failed
            return error
        return StoreClosed("the store has been closed") if self.closing else None

    def written(self) -> dict[str, Place]:
        """What has been written last of each key."""
        return dict(self._places)

    @property
    def _over(self) -> bool:
        return self.failed is not None or self.closing

    def abandon(self) -> None:
        """In a forked child: lets go of the parent's files and locks."""
        for folder in self.folders:
            folder.release()
        for drive in self.drives:
            drive.file.close()

    def _post(self, call: Callable[[], None]) -> None:
        if self.pid != os.getpid():
            error = self.refusal()
            assert error is not None
            raise error
        self._inbox.put(call)
        if self._ended.is_set():
            self._sweep()

    # The keeper's thread. Nothing below is called by another, but for ``_sweep`` once that has ended.

    def _work(self) -> None:
        while not self._ended.is_set():
            call = self._inbox.get()
            try:
                call()
            except BaseException as error:  # a fault of this file: nobody shall wait for ever
                self._fail(error)
            del call
        self._sweep()

    def _sweep(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    def _accept(self, operation: Operation) -> None:
        error = self.refusal()
        if error is not None:
            operation.ticket.end(error)
            return
        operation.commits = self._came
        queue = self._queues[operation.key]
        if not operation.writes:
            for earlier in queue:
                self._hurry(earlier)
        queue.append(operation)
        self._unfinished[operation] = None
        self._begin(operation.key)

    def _hurry(self, operation: Operation) -> None:
        if operation.writes and not operation.urgent:
            operation.urgent = True
            if operation.begun:
                for drive in self.drives:
                    drive.hurry(operation)

    def _begin(self, key: str) -> None:
        """Begins what may begin: reads at the front together, or a write at the front."""
        while not self._over and (refused := self._begin_until_refused(key)) is not None:
            self._finish(*refused)

    def _begin_until_refused(self, key: str) -> tuple[Operation, Exception] | None:
        for i, operation in enumerate(self._queues[key]):
            if operation.writes and (i or operation.begun or not self._may_write(operation)):
                return None
            if not operation.begun:
                operation.begun = True
                error = self._start(operation)
                if error is not None:
                    return operation, error
            if operation.writes:
                return None
        return None

    def _may_write(self, operation: Operation) -> bool:
        if self._commits and operation.commits > self._commits[0].number:
            return False
        if self._untouched and not self._marking:
            self._marking = True
            self._publish(self.manifest.next(dirty=True), self._on_mark)
        return not self._untouched

    def _on_mark(self, job: Job, error: BaseException | None) -> None:
        self._marking = self._untouched = False
        if error is not None:
            self._fail(error)
        self._begin_all()

    def _begin_all(self) -> None:
        for key, queue in self._queues.items():
            if queue:
                self._begin(key)

    def _start(self, operation: Operation) -> Exception | None:
        """Gives an operation's pieces to the drives. Returns: why it may not be done, if so."""
        place = self._places.get(operation.key)
        error = self._wrong_version(operation, place)
        if error is not None:
            return error
        sums: tuple[int, ...] | None = None
        if operation.writes:
            last = self._committed.get(operation.key)
            operation.slot = 0 if last is None or self.manifest.slots == 1 else 1 - last
        else:
            assert place is not None
            operation.slot = place.slot
            if self._checks == "all" or operation.compared or operation.key in self._old:
                sums = place.sums
        memory = as_memory(operation.buffer)
        jobs: list[tuple[int, Transfer]] = []
        for drive in range(len(self.drives)):
            for offset, first, nbytes in operation.extent.pieces(drive, operation.slot):
                number, piece = len(jobs), memory[first : first + nbytes]
                hasher = self.hasher if operation.writes or sums is not None else None
                expected = None if sums is None else sums[number]
                done = self._come_back(self._on_transfer)
                job = Transfer(done, operation, number, operation.writes, offset, piece, hasher, expected)
                jobs.append((drive, job))
        operation.left, operation.sums = len(jobs), [None] * len(jobs)
        for drive, job in jobs:
            self.drives[drive].put(job, urgent=operation.urgent or not operation.writes)
        return None

    def _wrong_version(self, operation: Operation, place: Place | None) -> Exception | None:
        key, wanted, version = operation.key, operation.version, None if place is None else place.version
        if operation.writes:
            assert wanted is not None
            if version is not None and wanted < version:
                return ValueError(f"{key!r} is written as version {wanted} over version {version}: versions only rise")
        elif version is None:
            return StaleRead(f"{key!r} is read, but has never been written")
        elif wanted is not None and wanted != version:
            return StaleRead(f"{key!r} is read as version {wanted}; the store has version {version}")
        return None

    def _come_back(self, call: Callable[[Job, BaseException | None], None]) -> Callable[..., None]:
        return lambda job, error: self._inbox.put(partial(call, job, error))

    def _on_transfer(self, job: Job, error: BaseException | None) -> None:
        assert isinstance(job, Transfer)
        operation = job.owner
        assert isinstance(operation, Operation)
        if error is not None and operation.error is None:
            if isinstance(error, DriveError):
                error.strerror = f"{operation.key!r}: {error.strerror}"
            operation.error = error
        operation.sums[job.number] = job.sum
        operation.left -= 1
        if error is not None and operation.writes and self.failed is None:
            self.failed = error
        if operation.left == 0:
            self._finish(operation, operation.error)
        if self.failed is not None:
            self._drop_waiting()
        self._begin(operation.key)

    def _finish(self, operation: Operation, error: BaseException | None) -> None:
        if operation not in self._unfinished:
            return
        del self._unfinished[operation]
        self._queues[operation.key].remove(operation)
        if operation.writes and error is None:
            assert operation.version is not None
            sums = None if self.hasher is None else tuple(s for s in operation.sums if s is not None)
            self._places[operation.key] = Place(operation.slot, operation.version, sums)
            self._old.discard(operation.key)
        operation.ticket.end(error)
        for ticket, waiting in list(self._drains):
            waiting.discard(operation)
            if not waiting:
                self._drains.remove((ticket, waiting))
                ticket.end(self.refusal())
        self._go_on_with_commit()

    def _fail(self, error: BaseException) -> None:
        """Ends everything that has not begun; what is under way comes back by itself."""
        if self.failed is None:
            self.failed = without_frames(error)
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        refusal = self.refusal()
        dropped = [job for drive in self.drives for job in drive.clear()]
        for operation in list(self._unfinished):
            if operation.left == 0:  # it has no piece under way
                operation.begun = True
                self._finish(operation, operation.error or refusal)
        for job in dropped:
            if isinstance(job, Transfer):  # errands are of commits, which end here too
                self._on_dropped(job, refusal)
        while self._commits:
            self._commits.popleft().ticket.end(refusal)

    def _on_dropped(self, job: Transfer, refusal: BaseException | None) -> None:
        operation = job.owner
        assert isinstance(operation, Operation)
        operation.error = operation.error or refusal
        operation.left -= 1
        if operation.left == 0:
            self._finish(operation, operation.error)

    def _drain(self, ticket: Ticket) -> None:
        if self._unfinished and not self.closing:
            self._drains.append((ticket, set(self._unfinished)))
        else:
            ticket.end(self.refusal())

    def _commit(self, step: int, ticket: Ticket) -> None:
        error = self.refusal()
        if error is not None:
            ticket.end(error)
            return
        self._commits.append(Commit(step, self._came, ticket))
        self._came += 1
        self._go_on_with_commit()

    def _go_on_with_commit(self) -> None:
        """Syncs the drives once all writes before the first commit are done."""
        if self._over or not self._commits or self._commits[0].left >= 0:
            return
        commit = self._commits[0]
        if any(operation.writes and operation.commits <= commit.number for operation in self._unfinished):
            return
        commit.left = len(self.drives)
        for drive in self.drives:
            done = self._come_back(partial(self._on_sync, commit))
            drive.put(Errand(done, drive.file.sync), urgent=True)

    def _on_sync(self, commit: Commit, job: Job, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        if not self._commits or self._commits[0] is not commit:
            return  # it has failed
        commit.left -= 1
        if commit.left == 0:
            manifest = self.manifest.next(step=commit.step, dirty=False, places=dict(self._places))
            self._publish(manifest, partial(self._on_commit, commit))

    def _publish(self, manifest: Manifest, done: Callable[[Job, BaseException | None], None]) -> None:
        self.manifest = manifest
        publish = partial(manifest.publish, self.folders[0].path)
        self.drives[0].put(Errand(self._come_back(done), publish), urgent=True)

    def _on_commit(self, commit: Commit, job: Job, error: BaseException | None) -> None:
        if error is not None:  # whether it is published is unknown, and with it which slot may be written
            self._fail(error)
        if not self._commits or self._commits[0] is not commit:
            return
        self._commits.popleft()
        self._committed = {key: place.slot for key, place in self.manifest.places.items()}
        self._untouched = self.manifest.slots == 1
        commit.ticket.end()
        self._go_on_with_commit()
        self._begin_all()

    def _close(self, keep: bool) -> None:
        if self._ended.is_set() or self.closing:
            return
        self.closing = True
        self._drop_waiting()
        stopped = [drive.stop(PATIENCE) for drive in self.drives]
        self._sweep()  # what came back while these threads ended
        refusal = self.refusal()
        for operation in list(self._unfinished):  # a drive that does not answer
            self._finish(operation, refusal)
        try:
            for drive, folder, ended in zip(self.drives, self.folders, stopped, strict=True):
                if ended:  # otherwise a thread may still be writing there
                    drive.file.close()
                if keep:
                    folder.release()
                elif (left := remove(folder)) is not None:
                    self.left_behind.append(left)
        finally:
            living.discard(self)
            self._ended.set()
            self._closed.end()


def close_all() -> None:
    """At the end of the interpreter, whose threads still run: removes what is left."""
    for keeper in list(living):
        if keeper.pid == os.getpid():
            keeper.close(keep=False).wait(PATIENCE + 10)


def abandon_all() -> None:
    """In a forked child."""
    for keeper in list(living):
        keeper.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=abandon_all)
