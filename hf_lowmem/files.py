"""``open_file``: a file on a drive, read and written at positions, past the page cache where the system can.

Through the page cache the same bytes cost 20 to 40 times the CPU time, push the user's own files out of RAM, and a
failed write is heard of only at the next sync.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import sys
import warnings
from pathlib import Path

from .drive_file import BLOCK, DriveError, DriveFile, DriveFull, EndOfFile, failure
from .windows_files import WindowsFile, drive_kind

if sys.platform != "win32":
    import fcntl

__all__ = ["BLOCK", "DriveError", "DriveFile", "DriveFull", "EndOfFile", "PosixFile", "filesystem", "open_file"]

UNALIGNED = (errno.EINVAL, errno.EOPNOTSUPP)  # what a file system without direct I/O answers
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "network drive"}
IN_RAM = {"tmpfs", "ramfs", "RAM disk"}


class PosixFile(DriveFile):
    """On Linux and macOS. See ``DriveFile``, and ``open_file`` for what is done at opening."""

    def __init__(self, path: str | os.PathLike[str], create: bool) -> None:
        super().__init__(path)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._fd = os.open(path, flags, 0o600)

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [buffer], offset)

    def _write_some(self, buffer: memoryview, offset: int) -> int:
        return os.pwritev(self._fd, [buffer], offset)

    def preallocate(self, nbytes: int) -> None:
        try:
            if not hasattr(os, "posix_fallocate"):  # macOS
                return self.fill(nbytes)
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                if error.errno not in (*UNALIGNED, errno.ENOSYS):
                    raise failure("preallocating", self.path, 0, nbytes, 0, error) from error
                self.fill(nbytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)  # ext4 keeps what it had got before it was full
            raise

    def go_direct(self, may_write: bool) -> bool:
        """Turns direct I/O on, and tries it on the first block. Returns whether that block came past the page cache."""
        if sys.platform == "darwin":
            fcntl.fcntl(self._fd, getattr(fcntl, "F_NOCACHE", 48), 1)
            return True
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        block = memoryview(mmap.mmap(-1, BLOCK))
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
            self._read_some(block, 0)
            if may_write:
                self._write_some(block, 0)
        except OSError as error:
            if error.errno not in UNALIGNED:
                raise failure("trying", self.path, 0, BLOCK, 0, error) from error
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return hasattr(os, "O_DIRECT")

    def overwrite_in_place(self) -> bool:
        """Has btrfs write this empty file's blocks where they are (NOCOW). Returns whether it will.

        Otherwise each write takes new space, also within a preallocated file, and direct writes go through the cache.
        """
        get, set_, nocow = 0x80086601, 0x40086602, 0x00800000  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOCOW_FL
        try:
            flags = int.from_bytes(fcntl.ioctl(self._fd, get, bytes(8)), sys.byteorder)
            fcntl.ioctl(self._fd, set_, (flags | nocow).to_bytes(8, sys.byteorder))
        except OSError:
            return False
        return True

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def sync(self) -> None:
        try:
            if sys.platform == "darwin":
                fcntl.fcntl(self._fd, getattr(fcntl, "F_FULLFSYNC", 51))  # fsync alone leaves it in the drive's cache
            else:
                os.fdatasync(self._fd)
        except OSError as error:
            raise failure("syncing", self.path, 0, self.nbytes, 0, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def open_file(path: str | os.PathLike[str], nbytes: int, create: bool = True, direct: bool = True) -> DriveFile:
    """Opens a file of fixed size; a new one has all of its space when this returns.

    Args:
        path: of the file; its folder exists.
        nbytes: its size, a multiple of 4096.
        create: makes it, and it must not be there; otherwise it must be, with this size.
        direct: past the page cache; where the file system cannot, one warning says so, and what it costs.

    Raises:
        DriveFull: no room; nothing is left behind then.
        FileExistsError, FileNotFoundError, PermissionError: as the system says.
        EndOfFile: a file that is there is shorter.
    """
    if nbytes <= 0 or nbytes % BLOCK:
        raise ValueError(f"{path}: a file of {nbytes} bytes; it must have a positive multiple of {BLOCK}")
    if sys.platform == "win32":
        file: DriveFile = WindowsFile(path, create)
    else:
        file = PosixFile(path, create)
    try:
        _prepare(file, nbytes, create, direct)
    except BaseException:
        file.close()
        if create:
            os.unlink(path)
        raise
    return file


def _prepare(file: DriveFile, nbytes: int, create: bool, direct: bool) -> None:
    file.nbytes = nbytes
    if create:
        on_btrfs = isinstance(file, PosixFile) and filesystem(file.path) == "btrfs"
        if on_btrfs and isinstance(file, PosixFile) and not file.overwrite_in_place():
            warnings.warn(
                f"{file.path} is on btrfs, which refuses to write it in place (chattr +C): each write takes new "
                "space, and a full drive will stop the training. Use ext4 or xfs, or a folder with chattr +C.",
                RuntimeWarning,
                stacklevel=4,
            )
        file.preallocate(nbytes)
    elif file.size() != nbytes:
        text = f"{file.path}: {nbytes} bytes wanted, the file has {file.size()}: it was cut, or is not this one."
        raise EndOfFile(errno.EIO, text, file.path, 0, nbytes, file.size())
    if isinstance(file, PosixFile):
        file.direct = direct and file.go_direct(may_write=create)
    if direct and not file.direct:
        warnings.warn(
            f"{file.path}: its file system ({filesystem(file.path) or 'unknown'}) has no direct I/O. The page cache "
            "costs 20 to 40 times the CPU time and RAM besides cpu_memory; a local ext4, xfs or NTFS does not.",
            RuntimeWarning,
            stacklevel=4,
        )


def filesystem(path: str | os.PathLike[str]) -> str:
    """The kind of file system under a path: "ext4", "btrfs", "tmpfs", "nfs4", "overlay", ...; "" where unknown."""
    if sys.platform == "win32":
        return drive_kind(path)
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # macOS
        return ""
    return filesystem_in(table, os.path.realpath(path))


def filesystem_in(table: str, path: str) -> str:
    """The same by Linux's table of mounts (``/proc/self/mountinfo``), for a path without symbolic links."""
    kind, longest = "", -1
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), fields[4])  # spaces and the like
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= longest:  # of two in one place the later one is seen
            kind, longest = right.split()[0], len(mount)
    return kind


def warn_of(path: str | os.PathLike[str]) -> None:
    """Warns of a file system that is no local drive, by its kind."""
    kind = filesystem(path)
    if kind in IN_RAM:
        what = f"is in RAM ({kind}): what rests there takes the memory that it should save"
    elif kind in NETWORK or kind.startswith("fuse.") or kind in ("9p", "virtiofs"):
        what = f"is no local drive ({kind}): each step waits for it, and it may go away"
    else:
        return
    warnings.warn(f"{path} {what}. Give a folder on a local drive.", RuntimeWarning, stacklevel=3)
