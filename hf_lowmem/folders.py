"""``RunFolder``: a store's own folder on one drive, locked as long as its process lives.

[Note: whose folder] Each store makes a folder of a fresh name within the one that it was given, so two never meet. A
folder of that kind belongs to a living process if its lock is held, and to one that has died if it is not and there is
a manifest. Whatever else lies around is somebody else's, and never touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .drive_file import DriveFull
from .manifest import NAMES, RESERVE, UNFINISHED, Manifest, read_manifest
from .plan import readable

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

PREFIX = "hf_lowmem-"
DATA = "store.bin"
LOCK = "lock"
MARGIN = 0.05  # of what is needed, that must be free besides


class FolderInUse(RuntimeError):
    """A folder belongs to a living process, or another has left something in it that was to be kept."""


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder's absolute path.

    Raises: FileNotFoundError, NotADirectoryError, PermissionError, with the way out.
    """
    given = os.fspath(folder)
    path = Path(os.path.abspath(os.path.expanduser(given)))
    where = str(path) if str(path) == given else f"{given} ({path})"
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, f"no folder {where}: make it (mkdir), or mount its drive")
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{where} is no folder: give one on the drive")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{where} is read-only for this user: see its owner, and how it is mounted")
    return path


def check_space(needs: Iterable[tuple[Path, int]]) -> None:
    """Raises DriveFull unless every drive has room for so many bytes in its folders together, and 5 % more."""
    drives: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in needs:
        drive = os.stat(folder).st_dev
        drives[drive] = (folder, drives.get(drive, (folder, 0))[1] + nbytes)
    for folder, nbytes in drives.values():
        free, wanted = shutil.disk_usage(folder).free, int(nbytes * (1 + MARGIN))
        if free < wanted:
            raise DriveFull(
                errno.ENOSPC,
                f"{folder}: wanted {readable(wanted)} (the store's {readable(nbytes)} and {MARGIN:.0%}), "
                f"{readable(free)} are free. Free space there, or add a folder on another drive.",
                str(folder),
                0,
                wanted,
                free,
            )


def lock(path: Path, create: bool = False) -> int | None:
    """Opens and locks a file. Returns its descriptor; None if somebody has the lock."""
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | (os.O_CREAT if create else 0)
    fd = os.open(path, flags, 0o600)
    try:
        if sys.platform == "win32":
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return None
        raise
    return fd


class RunFolder:
    """See the module. Made by ``create`` or ``take``.

    Attributes:
        path: of the folder; ``data`` is the file in it.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock = path, lock_fd

    @property
    def data(self) -> Path:
        return self.path / DATA

    @classmethod
    def create(cls, parent: Path, store: str) -> RunFolder:
        """A new folder. Raises: OSError, as the system says."""
        path = parent / f"{PREFIX}{store}"
        path.mkdir(mode=0o700)
        fd = lock(path / LOCK, create=True)
        if fd is None:  # somebody looks whether it was left behind; without a manifest they will leave it alone
            raise FolderInUse(f"{path} was locked by another process at once: start again")
        return cls(path, fd)

    @classmethod
    def take(cls, path: Path) -> RunFolder | None:
        """A folder that was left behind. None if its process lives, or if it is going away."""
        try:
            fd = lock(path / LOCK)
        except FileNotFoundError:
            return None
        return None if fd is None else cls(path, fd)

    def release(self) -> None:
        """Gives the lock back, and leaves the rest; again is nothing."""
        if self._lock >= 0:
            fd, self._lock = self._lock, -1
            os.close(fd)

    def remove(self) -> None:
        """Removes what a store has put there, the data first: what is cut short is still known by its manifest.

        Raises: OSError, as the system says; something that is not the store's stays, and the folder with it.
        """
        for name in (DATA, RESERVE, UNFINISHED, *NAMES):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)
        self.release()  # Windows removes no open file
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / LOCK)
        os.rmdir(self.path)


@dataclass(frozen=True)
class Leftover:
    """What a store that was not closed has left in one folder.

    Args:
        path: of its own folder.
        manifest: the newest that could be read.
        damaged: another one could not.
    """

    path: Path
    manifest: Manifest
    damaged: bool


def leftovers(folder: str | os.PathLike[str]) -> list[Leftover]:
    """Whatever stores of processes that have died have left in a folder; nothing of a living one is among it."""
    found = []
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        with contextlib.suppress(PermissionError, NotADirectoryError):  # another user's, or no store's at all
            manifest, damaged = read_manifest(path)
            if manifest is None or path.name != f"{PREFIX}{manifest.store}":
                continue
            taken = RunFolder.take(path)
            if taken is not None:
                taken.release()
                found.append(Leftover(path, manifest, damaged))
    return found


def deal_with_leftovers(folders: Sequence[Path], policy: str) -> None:
    """Cleans, keeps or refuses what others have left.

    Args:
        folders: that a store is to be made in.
        policy: "clean", "keep" or "refuse".

    Raises: FolderInUse for "refuse", with what there is.
    """
    if policy == "keep":
        return
    found = [leftover for folder in folders for leftover in leftovers(folder)]
    if found and policy == "refuse":
        names = ", ".join(f"{left.path} (step {left.manifest.step} of {left.manifest.identity!r})" for left in found)
        raise FolderInUse(
            f"a store of a process that has died is left: {names}. Store.open goes on from its last whole step; "
            'leftovers="clean" removes it, leftovers="keep" leaves it and takes more space.'
        )
    for leftover in found:
        folder = RunFolder.take(leftover.path)
        if folder is not None:
            warn_of_rest(remove(folder))


def remove(folder: RunFolder) -> str | None:
    """Removes a folder. Returns: what to tell the user, if it could not be."""
    try:
        folder.remove()
    except OSError as error:
        return f"{folder.path} could not be removed ({error}): remove it by hand."
    finally:
        folder.release()
    return None


def warn_of_rest(left: str | None) -> None:
    """Warns of what could not be removed."""
    if left is not None:
        warnings.warn(left, RuntimeWarning, stacklevel=3)
