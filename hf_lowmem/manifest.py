"""``Manifest``: what a store's files hold, as a small file beside them; ``Extent``: one key's place in these files.

[Note: one moment] A manifest appears whole or not at all: it is written under another name, synced, and renamed. Two
generations take turns in two names, so that the one before is there until the one after is. With several drives the
first one's manifest counts; the others only say to which store they belong.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from .drive_file import BLOCK, failure, whole_blocks

FORMAT = 1
NAMES = ("manifest-0.json", "manifest-1.json")  # of even and of odd generations
UNFINISHED = "manifest.tmp"
RESERVE = "reserve"  # room for a manifest, should others fill the drive
LEAST = 2**20  # bytes of a piece: smaller ones cost more calls than they gain


@dataclass(frozen=True)
class Extent:
    """One key's place. Segment d of it lies in drive d's file, in one piece; the slots of a drive one after another.

    Args:
        nbytes: of all segments together.
        segments: bytes on each drive.
        offsets: of the first slot's segment in each drive's file.
        piece: bytes that one call moves at most, and that one checksum is of.
    """

    nbytes: int
    segments: tuple[int, ...]
    offsets: tuple[int, ...]
    piece: int

    def pieces(self, drive: int, slot: int) -> list[tuple[int, int, int]]:
        """(offset in the file, first byte in the buffer, bytes) of each piece on a drive."""
        start, size = sum(self.segments[:drive]), self.segments[drive]
        offset = self.offsets[drive] + slot * size
        return [(offset + i, start + i, min(self.piece, size - i)) for i in range(0, size, self.piece)]


@dataclass(frozen=True)
class Place:
    """Where a key's bytes are, and which.

    Args:
        slot: that holds them.
        version: that they were written as.
        sums: of each piece, drive after drive; None where none were taken.
    """

    slot: int
    version: int
    sums: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """All that is needed to read a store's files again.

    Args:
        store: a name that no other store has.
        drive, drives: this folder's number, and how many there are.
        identity: what the caller calls that which rests here.
        sizes: bytes of each drive's file.
        slots: for each extent.
        generation: counts what was published.
        step: the last whole one; None before the first.
        dirty: the step's bytes may have been overwritten since.
        extents, places: by key.
    """

    store: str
    drive: int
    drives: int
    identity: str
    sizes: tuple[int, ...]
    slots: int
    generation: int = 0
    step: int | None = None
    dirty: bool = False
    extents: Mapping[str, Extent] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)

    def publish(self, folder: Path) -> None:
        """Makes this the manifest of a folder. Raises: DriveError; then the one before it may still count."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=True, separators=(",", ":")).encode()
        data = body + b"\n%08x\n" % zlib.crc32(body)
        try:
            try:
                self._write(folder, data)
            except OSError as error:
                if error.errno != errno.ENOSPC or not (folder / RESERVE).exists():
                    raise
                os.unlink(folder / RESERVE)
                self._write(folder, data)
        except OSError as error:
            raise failure("publishing", str(folder / UNFINISHED), 0, len(data), 0, error) from error

    def _write(self, folder: Path, data: bytes) -> None:
        unfinished = folder / UNFINISHED
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / NAMES[self.generation % 2])
        sync_folder(folder)

    def reserve(self, folder: Path) -> None:
        """Takes room in a folder for the largest manifest that may come. Raises: OSError, as the system says."""
        pieces = sum(len(extent.pieces(d, 0)) for extent in self.extents.values() for d in range(self.drives))
        names = sum(6 * len(key) for key in self.extents)
        nbytes = 4096 + 2 * names + 24 * pieces + (300 + 50 * self.drives) * len(self.extents)
        with open(folder / RESERVE, "wb") as file:
            file.write(bytes(whole_blocks(2 * nbytes)))
            file.flush()
            os.fsync(file.fileno())

    def next(self, **changes: object) -> Manifest:
        """The generation after this one."""
        return replace(self, generation=self.generation + 1, **changes)  # type: ignore[arg-type]


def sync_folder(folder: Path) -> None:
    """Has a folder's names on the drive; Windows does that by itself."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_manifest(folder: Path) -> tuple[Manifest | None, bool]:
    """The newest manifest of a folder that can be read; None if there is none.

    Returns: it, and whether a file beside it could not be read, which may have been newer.
    """
    found, damaged = [], False
    for name in NAMES:
        with contextlib.suppress(FileNotFoundError):
            try:
                found.append(_parse((folder / name).read_bytes()))
            except (ValueError, KeyError, TypeError):
                damaged = True
    return max(found, key=lambda manifest: manifest.generation, default=None), damaged


def _parse(data: bytes) -> Manifest:
    body, crc, _ = data.rsplit(b"\n", 2)
    if int(crc, 16) != zlib.crc32(body):
        raise ValueError("its checksum is another")
    values = json.loads(body)
    if values.pop("format") != FORMAT:
        raise ValueError("another format")
    for extent in values["extents"].values():
        extent["segments"], extent["offsets"] = tuple(extent["segments"]), tuple(extent["offsets"])
    for place in values["places"].values():
        place["sums"] = None if place["sums"] is None else tuple(place["sums"])
    values["sizes"] = tuple(values["sizes"])
    values["extents"] = {key: Extent(**extent) for key, extent in values["extents"].items()}
    values["places"] = {key: Place(**place) for key, place in values["places"].items()}
    return Manifest(**values)


def lay_out(
    extents: Mapping[str, int], shares: Sequence[float], slots: int, threads: int, chunk: int
) -> tuple[dict[str, Extent], tuple[int, ...]]:
    """Gives every extent its place.

    Args:
        extents: bytes of each, multiples of 4096.
        shares: of each drive, of any sum.
        slots: for each extent.
        threads: a drive; a segment is cut so that all have some of it.
        chunk: bytes of a piece at most.

    Returns: the extents, and the bytes of each drive's file.
    """
    ends = [sum(shares[: i + 1]) / sum(shares) for i in range(len(shares))]
    sizes = [0] * len(shares)
    placed = {}
    for key, nbytes in extents.items():
        blocks = nbytes // BLOCK
        cuts = [0, *(round(blocks * end) for end in ends[:-1]), blocks]
        segments = tuple((b - a) * BLOCK for a, b in pairwise(cuts))
        share = -(-max(segments) // threads)
        piece = max(min(whole_blocks(share), chunk), min(LEAST, chunk))
        placed[key] = Extent(nbytes, segments, tuple(sizes), piece)
        sizes = [size + slots * segment for size, segment in zip(sizes, segments, strict=True)]
    return placed, tuple(max(size, BLOCK) for size in sizes)
