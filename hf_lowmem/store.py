"""``Store``: pieces of memory that rest on solid-state drives, and come and go while something else is computed.

It is scratch space, not a checkpoint: nothing is left of it when it is closed. Should the process die, ``Store.open``
finds the last step that was committed, whole, among what it left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torch import Tensor

from .buffers import aligned, as_memory
from .drive import CorruptRead, Drive, Traffic
from .drive_file import BLOCK, DriveError, DriveFull, EndOfFile, whole_blocks, without_frames
from .files import open_file, warn_of
from .folders import (
    FolderInUse,
    Leftover,
    RunFolder,
    check_folder,
    check_space,
    deal_with_leftovers,
    leftovers,
    remove,
    warn_of_rest,
)
from .keeper import Keeper, close_all
from .manifest import Manifest, lay_out, read_manifest
from .ticket import Operation, StaleRead, StoreClosed, StoreFailed, Ticket

__all__ = [
    "CannotResume",
    "CorruptRead",
    "DriveError",
    "DriveFull",
    "EndOfFile",
    "FolderInUse",
    "StaleRead",
    "Store",
    "StoreClosed",
    "StoreFailed",
    "Ticket",
    "Traffic",
]

CHUNK = 16 * 2**20  # bytes a call: with less, Python's other threads hold it up
THREADS = 4  # a drive; 8 for one that reads more than 7 GB/s
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class CannotResume(RuntimeError):
    """What is left of a store is no whole step, or not one of what is to be trained."""


class Store:
    """Extents of fixed sizes on one or several drives, read and written by threads of its own.

    An extent lies on all drives at once, a share on each, and moves as a whole. With two slots each write goes to the
    one that the last committed step does not need: the same bytes are written, and a crash at any moment leaves a whole
    step; they take twice the space. With one slot (``slots=1``) a step that was begun after a commit spoils it, and
    ``open`` says so.

    All space is taken here, so no later write finds a drive full. A write or a sync that fails ends the store: all
    later calls raise ``StoreFailed`` with the first error as cause.

    Args:
        folders: one, or one on each drive; each is given a subfolder of the store's own.
        extents: bytes of each by its key; multiples of 4096.
        slots: 2 or 1, for each extent.
        identity: what ``open`` must be told to take these bytes up again, such as a hash of the model's layout.
        threads_per_drive: that read and write.
        chunk: bytes a call moves at most; a multiple of 4096.
        shares: of each drive, of any sum, such as their measured GB/s; None: equal.
        verify: "off"; "commit": a checksum of each piece is kept, and compared after a crash and by ``verify``;
            "always": in each read as well. Checksums cost 0.1 s of a core for each GB, and need xxhash.
        leftovers: of processes that have died, in these folders: "clean" removes, "keep" leaves them, "refuse" raises
            ``FolderInUse``. What no store has made is never touched.
        direct: past the page cache where the file system can.

    Raises:
        FileNotFoundError, NotADirectoryError, PermissionError: a folder is none, or cannot be written.
        DriveFull: too little space; nothing has been written then.
        FolderInUse: see ``leftovers``.
        ImportError: ``verify`` without xxhash.
        ValueError: what is no multiple of 4096, and folders that are the same.
    """

    def __init__(
        self,
        folders: Folders,
        extents: Mapping[str, int],
        slots: int = 2,
        identity: str = "",
        threads_per_drive: int = THREADS,
        chunk: int = CHUNK,
        shares: Sequence[float] | None = None,
        verify: str = "off",
        leftovers: str = "clean",
        direct: bool = True,
    ) -> None:
        paths = _checked_folders(folders)
        weights = [1.0] * len(paths) if shares is None else list(shares)
        _check(extents, slots, threads_per_drive, chunk, weights, len(paths), verify, leftovers)
        hasher = _hasher(verify)
        deal_with_leftovers(paths, leftovers)
        placed, sizes = lay_out(extents, weights, slots, threads_per_drive, chunk)
        check_space(zip(paths, sizes, strict=True))
        for path in paths:
            warn_of(path)
        name = uuid.uuid4().hex[:16]
        manifest = Manifest(name, 0, len(paths), identity, sizes, slots, extents=placed)
        with contextlib.ExitStack() as undo:
            runs, drives = [], []
            for i, path in enumerate(paths):
                run = RunFolder.create(path, name)
                undo.callback(_take_back, run)
                runs.append(run)
                # Before the data, so that a folder that is left here is known.
                replace(manifest, drive=i, extents={} if i else placed).publish(run.path)
                if i == 0:
                    manifest.reserve(run.path)
                file = open_file(run.data, sizes[i], create=True, direct=direct)
                undo.callback(file.close)
                drives.append(Drive(file, threads_per_drive, f"hf_lowmem_drive{i}"))
            self._run(undo, drives, runs, manifest, hasher, "all" if verify == "always" else "off")

    def _run(
        self,
        undo: contextlib.ExitStack,
        drives: list[Drive],
        runs: list[RunFolder],
        manifest: Manifest,
        hasher: Callable[[memoryview], int] | None,
        checks: str,
    ) -> None:
        for drive in drives:
            drive.start()
            undo.callback(drive.stop, None)
        self.extents = {key: extent.nbytes for key, extent in manifest.extents.items()}
        self._given = {key: place.version for key, place in manifest.places.items()}  # of each key's last write
        self._keeper = keeper = Keeper(drives, runs, manifest, hasher, checks)
        weakref.finalize(self, _let_go, keeper).atexit = False  # ``close_all`` does it then, and waits
        undo.pop_all()

    @classmethod
    def open(
        cls,
        folders: Folders,
        identity: str,
        name: str | None = None,
        threads_per_drive: int = THREADS,
        verify: str = "off",
        direct: bool = True,
    ) -> Store:
        """Takes up what the store of a process that has died left in these folders, at its last committed step.

        Args:
            folders: that it was made with, in their order.
            identity: that it was made with.
            name: of the store, where there are several: what its subfolder's name ends in.
            threads_per_drive, verify, direct: see ``Store``. What was there is compared with its checksums as it is
                read, unless ``verify`` is "off".

        Raises:
            CannotResume: there is none, it is of something else, on other drives, no step of it was committed, or with
                one slot the step after that had begun.
            EndOfFile, DriveError: its files have been cut, or cannot be read.
        """
        paths = _checked_folders(folders)
        hasher = _hasher(verify)
        found = _find(paths, identity, name)
        first = found[0].manifest
        with contextlib.ExitStack() as undo:
            runs, drives = [], []
            for i, left in enumerate(found):
                run = RunFolder.take(left.path)
                if run is None:
                    raise FolderInUse(f"{left.path} has been taken by another process")
                undo.callback(run.release)
                if read_manifest(run.path)[0] != left.manifest:
                    raise FolderInUse(f"{left.path} was being used by another process until now: try again")
                runs.append(run)
                file = open_file(run.data, first.sizes[i], create=False, direct=direct)
                undo.callback(file.close)
                drives.append(Drive(file, threads_per_drive, f"hf_lowmem_drive{i}"))
            self = cls.__new__(cls)
            checks = {"off": "off", "commit": "old", "always": "all"}[verify]
            self._run(undo, drives, runs, first, hasher, checks)
        if found[0].damaged:
            self._trust_nothing(verify)
        return self

    def read(self, key: str, buffer: Tensor, version: int | None = None) -> Ticket:
        """Begins to read an extent, once writes of it that were begun before are done.

        Args:
            key: of the extent.
            buffer: ``uint8[nbytes]`` of its size in host memory, at a multiple of 4096; nobody else uses it until the
                ticket is done.
            version: that it must have; None takes any.

        Returns: a ticket, whose ``wait`` raises ``StaleRead`` for another version and for what was never written,
        ``CorruptRead``, ``DriveError``, ``StoreFailed``, ``StoreClosed``.
        """
        return self._submit(key, buffer, version, writes=False)

    def write(self, key: str, buffer: Tensor, version: int) -> Ticket:
        """Begins to write an extent, once operations on it that were begun before are done.

        Args:
            key, buffer: see ``read``.
            version: not less than the one before, such as the step's number.

        Returns: a ticket, whose ``wait`` raises ``DriveError``, ``StoreFailed``, ``StoreClosed``. It is in the drive's
        hands then, and safe from a crash after ``commit``.

        Raises: ValueError for a version that has been passed.
        """
        last = self._given.get(key)
        if last is not None and version < last:
            raise ValueError(f"{key!r} is written as version {version} over version {last}: versions only rise")
        return self._submit(key, buffer, version, writes=True)

    def _submit(self, key: str, buffer: Tensor, version: int | None, writes: bool) -> Ticket:
        error = self._keeper.refusal()
        if error is not None:
            raise error
        extent = self._keeper.manifest.extents.get(key)
        if extent is None:
            raise KeyError(f"no extent {key!r} in this store; it has {len(self.extents)} others")
        as_memory(buffer)  # raises what is wrong with it
        if buffer.numel() != extent.nbytes:
            raise ValueError(f"{key!r} has {extent.nbytes} bytes, the buffer {buffer.numel()}")
        if writes:
            assert version is not None
            self._given[key] = version
        ticket = Ticket(f"{'writing' if writes else 'reading'} {key!r}")
        self._keeper.submit(Operation(key, extent, writes, buffer, version, ticket))
        return ticket

    def drain(self, timeout: float | None = None) -> None:
        """Waits until all that was begun is done. Raises: StoreFailed if a write has failed; TimeoutError."""
        self._keeper.drain().wait(timeout)

    def commit(self, step: int) -> None:
        """Makes all writes that were begun before this the step that a crash leaves.

        Waits for them, and for the drives to have them. Writes of other threads that come meanwhile are held back;
        reads are not. One that is interrupted goes on.

        Raises: StoreFailed, or the DriveError of the sync.
        """
        ticket = self._keeper.commit(step)
        try:
            ticket.wait()
        except StoreFailed as error:
            if isinstance(error.__cause__, OSError):
                raise without_frames(error.__cause__) from None
            raise

    def verify(self) -> None:
        """Reads every extent that was written and compares it with its checksum.

        Raises: CorruptRead, for the first that has changed; ValueError if there are no checksums.
        """
        if self._keeper.hasher is None:
            raise ValueError('this store keeps no checksums: verify="commit" or "always" does')
        without = [key for key, place in self._keeper.written().items() if place.sums is None]
        if without:
            raise ValueError(f"{without} were written without checksums")
        sizes = {self.extents[key] for key in self._keeper.written()}
        for size in sizes:
            (buffer,) = aligned([size])
            for key in self._keeper.written():
                if self.extents[key] == size:
                    self._read_compared(key, buffer).wait()

    def _read_compared(self, key: str, buffer: Tensor) -> Ticket:
        ticket = Ticket(f"verifying {key!r}")
        extent = self._keeper.manifest.extents[key]
        self._keeper.submit(Operation(key, extent, False, buffer, None, ticket, compared=True))
        return ticket

    def _trust_nothing(self, verify: str) -> None:
        """One of two manifests is unreadable: perhaps the newer one, and then writes may have followed it."""
        try:
            if verify == "off" or any(place.sums is None for place in self._keeper.manifest.places.values()):
                raise CannotResume(
                    "one of the store's two manifests cannot be read, and without checksums nobody knows whether the "
                    'other is the last: resume from a checkpoint, or open it with verify="commit" if it was made so'
                )
            self.verify()
        except BaseException:
            self.close(keep=True)
            raise

    @property
    def step(self) -> int | None:
        """The last committed one; None before the first."""
        return self._keeper.manifest.step

    @property
    def paths(self) -> list[Path]:
        """The store's own folder on each drive."""
        return [folder.path for folder in self._keeper.folders]

    def segments(self, key: str) -> list[tuple[Path, int, int]]:
        """Where an extent lies that was written: (file, offset in it, bytes) on each drive, in the order of its bytes.

        Raises: KeyError if it was not written.
        """
        place, extent = self._keeper.written()[key], self._keeper.manifest.extents[key]
        sizes = zip(self._keeper.folders, extent.offsets, extent.segments, strict=True)
        return [(folder.data, offset + place.slot * size, size) for folder, offset, size in sizes]

    def version(self, key: str) -> int | None:
        """The version of an extent that has been written last; None if none has."""
        place = self._keeper.written().get(key)
        return None if place is None else place.version

    def stats(self, drive: int | None = None) -> Traffic:
        """What has been read and written so far, on one drive by its number or on all together."""
        drives = self._keeper.drives if drive is None else [self._keeper.drives[drive]]
        return sum((d.traffic for d in drives), Traffic())

    def close(self, keep: bool = False) -> None:
        """Ends the threads and removes the files; what is under way ends before, what has not begun is dropped.

        Args:
            keep: leaves them for ``open``.
        """
        keeper = self._keeper
        if keeper.pid != os.getpid():
            return  # a forked child: they are the parent's
        keeper.close(keep).wait()
        while keeper.left_behind:
            warn_of_rest(keeper.left_behind.pop())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _take_back(run: RunFolder) -> None:
    warn_of_rest(remove(run))


def _let_go(keeper: Keeper) -> None:
    """Nobody has the store any more. This may run in any thread at any moment, so it waits for nothing."""
    if keeper.pid == os.getpid():
        keeper.close(keep=False)


atexit.register(close_all)


def _checked_folders(folders: Folders) -> list[Path]:
    given = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
    if not given:
        raise ValueError("a store needs a folder")
    paths = [check_folder(folder) for folder in given]
    for i, path in enumerate(paths):
        for other in paths[:i]:
            if path.samefile(other):
                raise ValueError(f"{path} and {other} are the same folder; give one on each drive")
    return paths


def _check(
    extents: Mapping[str, int],
    slots: int,
    threads: int,
    chunk: int,
    shares: Sequence[float],
    drives: int,
    verify: str,
    leftovers: str,
) -> None:
    wrong = {key: whole_blocks(max(nbytes, 1)) for key, nbytes in extents.items() if nbytes <= 0 or nbytes % BLOCK}
    if not extents or wrong:
        raise ValueError(f"extents have positive multiples of {BLOCK} bytes; rounded up these would be {wrong}")
    if slots not in (1, 2):
        raise ValueError(f"slots={slots}: 2 keeps the last committed step, 1 takes half the space")
    if threads < 1 or chunk < BLOCK or chunk % BLOCK:
        raise ValueError(f"threads_per_drive={threads}, chunk={chunk}: one or more, and a multiple of {BLOCK}")
    if len(shares) != drives or min(shares) <= 0:
        raise ValueError(f"shares={list(shares)}: one positive number for each of {drives} folders")
    if leftovers not in ("clean", "keep", "refuse"):
        raise ValueError(f'leftovers={leftovers!r}: "clean", "keep" or "refuse"')
    if verify not in ("off", "commit", "always"):
        raise ValueError(f'verify={verify!r}: "off", "commit" or "always"')


def _hasher(verify: str) -> Callable[[memoryview], int] | None:
    if verify == "off":
        return None
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError(f"verify={verify!r} needs xxhash: pip install 'hf_lowmem[nvme]'") from error
    return xxh3_64_intdigest


def _find(paths: Sequence[Path], identity: str, name: str | None) -> list[Leftover]:
    """The left-over of one store on each of its drives."""
    everywhere = [{left.manifest.store: left for left in leftovers(path)} for path in paths]
    candidates = {
        store: left
        for store, left in everywhere[0].items()
        if left.manifest.drive == 0 and name in (None, store) and left.manifest.identity == identity
    }
    if len(candidates) != 1:
        others = {store: left.manifest.identity for store, left in everywhere[0].items()}
        raise CannotResume(
            f"{paths[0]} has {len(candidates)} stores of {identity!r} that a process has left"
            + (f": say which by name, one of {sorted(candidates)}" if candidates else f", and of others {others}")
        )
    ((store, first),) = candidates.items()
    manifest = first.manifest
    found = [lefts[store] for lefts in everywhere if store in lefts]
    if manifest.drives != len(paths) or [left.manifest.drive for left in found] != list(range(len(paths))):
        raise CannotResume(
            f"the store {store} lies on {manifest.drives} drives; found in order: "
            f"{[f'drive {left.manifest.drive} in {left.path.parent}' for left in found]}: give all its folders in order"
        )
    if manifest.step is None:
        raise CannotResume(f"no step of the store in {first.path} was committed: resume from a checkpoint")
    if manifest.dirty:
        raise CannotResume(
            f"the store in {first.path} has one slot, and the step after {manifest.step} had begun: its bytes are of "
            "two steps. Resume from a checkpoint; slots=2 would have kept the step"
        )
    return found
