"""``DriveFile``: what every system's file on a drive does, and the errors that it ends in.

Every call's count is looked at: a short one is gone on with, none at all is an error.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import mmap
import os

BLOCK = 4096  # offsets, lengths and addresses of direct I/O are multiples of it: enough for every drive known
FILL = 16 * 2**20  # bytes a call, where a file is written once with zeros

WAYS_OUT = {
    errno.ENOSPC: "Free space on this drive, or give other folders (several are striped).",
    errno.EDQUOT: "Your quota on this drive is used up: free space, or give other folders.",
    errno.EFBIG: "A limit on the size of files stops it: see `ulimit -f`, or a file system with larger files.",
    errno.EIO: "The drive fails or is gone: see the system's log (`dmesg`), and resume from the last checkpoint.",
    errno.ENXIO: "The drive is gone: connect it, and resume from the last checkpoint.",
    errno.ENODEV: "The drive is gone: connect it, and resume from the last checkpoint.",
    errno.EROFS: "The file system was made read-only, as happens after errors of a drive: see `dmesg`.",
    errno.EINVAL: "The file system refuses direct I/O of this shape: give a folder on another one.",
    errno.EBADF: "The file has been closed already.",
}


class DriveError(OSError):
    """A drive has not done what it was asked to. Its text names file, offset, bytes wanted and got, and the way out.

    Attributes:
        path: of the file.
        offset: in bytes, of the first byte that was asked for.
        wanted, got: bytes.
    """

    def __init__(
        self, code: int = 0, text: str = "", path: str = "", offset: int = 0, wanted: int = 0, got: int = 0
    ) -> None:
        super().__init__(code, text)
        self.path, self.offset, self.wanted, self.got = path, offset, wanted, got


class DriveFull(DriveError):
    """No space is left, or none that this user may have."""


class EndOfFile(DriveError):
    """A file ends, or a drive takes nothing more, before all bytes have been moved."""


def without_frames(error: BaseException) -> BaseException:
    """The same error to be raised, or kept: one that is both keeps the frames of whoever has waited for it."""
    fresh = copy.copy(error)
    fresh.__cause__ = error.__cause__
    if isinstance(error, OSError):
        fresh.strerror = error.strerror  # type: ignore[attr-defined]
    return fresh


def whole_blocks(nbytes: int) -> int:
    """So many bytes, rounded up to what a drive reads and writes directly: a multiple of 4096."""
    return -(-nbytes // BLOCK) * BLOCK


def failure(doing: str, path: str, offset: int, wanted: int, got: int, error: OSError) -> DriveError:
    """What the system has said of a read or write, with all that there is to know about it."""
    code = error.errno or errno.EIO
    text = (
        f"{doing} {path}: wanted {wanted} bytes at offset {offset}, got {got}: {error.strerror or error}. "
        f"{WAYS_OUT.get(code, 'Resume from the last checkpoint, if need be in another folder.')}"
    )
    kind = DriveFull if code in (errno.ENOSPC, errno.EDQUOT) else DriveError
    return kind(code, text, path, offset, wanted, got)


def address(buffer: memoryview) -> int:
    """Of a writable buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


class DriveFile:
    """One open file of fixed size. Any threads may read and write it at the same time.

    A system's own class says how one call is made; loops, counts and errors are here.

    Args:
        path: of the file.

    Attributes:
        path: as given, as text.
        direct: whether reads and writes go past the page cache.
        nbytes: that it has been opened for.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.direct, self.nbytes = os.fspath(path), False, 0

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer.

        Args:
            offset: of the first byte, in bytes; a multiple of 4096.
            buffer: ``uint8[n]``, writable, n and its address multiples of 4096.

        Raises:
            EndOfFile: the file is shorter than it should be.
            DriveError: whatever the system says.
            ValueError: a place or a size that direct I/O does not take.
        """
        self._move("reading", offset, buffer)

    def write(self, offset: int, buffer: memoryview) -> None:
        """Writes all of a buffer; arguments and errors as ``read``'s. Raises: DriveFull besides."""
        self._move("writing", offset, buffer)

    def _move(self, doing: str, offset: int, buffer: memoryview) -> None:
        wanted, done = len(buffer), 0
        if offset < 0 or offset % BLOCK or wanted % BLOCK or address(buffer) % BLOCK:
            raise ValueError(
                f"{doing} {self.path}: offset {offset}, {wanted} bytes and address {address(buffer):#x} must be "
                f"multiples of {BLOCK}; BufferPool's are"
            )
        call = self._read_some if doing == "reading" else self._write_some
        while done < wanted:
            try:
                count = call(buffer[done:], offset + done)
            except OSError as error:
                raise failure(doing, self.path, offset, wanted, done, error) from error
            reached = done + count
            # A direct call must begin at a whole block: the rest of one that was cut is moved again.
            onward = reached if reached == wanted or not self.direct else reached - reached % BLOCK
            if onward <= done:
                raise EndOfFile(
                    errno.EIO,
                    f"{doing} {self.path}: wanted {wanted} bytes at offset {offset}, got {reached}, and then nothing "
                    f"more: the file has been cut, or the drive fails. Resume from the last checkpoint.",
                    self.path,
                    offset,
                    wanted,
                    reached,
                )
            done = onward

    def fill(self, nbytes: int) -> None:
        """Writes zeros once, from first to last: where space cannot be had otherwise. Raises: as ``write``."""
        zeros = memoryview(mmap.mmap(-1, min(FILL, nbytes)))
        for offset in range(0, nbytes, FILL):
            self.write(offset, zeros[: nbytes - offset])

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        raise NotImplementedError

    def _write_some(self, buffer: memoryview, offset: int) -> int:
        raise NotImplementedError

    def preallocate(self, nbytes: int) -> None:
        """Takes all the space of an empty file, so that no later write can find the drive full.

        Raises: DriveFull, DriveError; what was taken has been given back then.
        """
        raise NotImplementedError

    def size(self) -> int:
        """Bytes of the file."""
        raise NotImplementedError

    def sync(self) -> None:
        """Returns when all that was written is on the drive. Raises: DriveError; then nobody knows what is there."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the file; again is nothing."""
        raise NotImplementedError
