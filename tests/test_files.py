"""A file on a drive: what is written is read, every count is looked at, every failure says where, and how to go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest
from faulty import MIB, FaultyFile, mounted, python, shim  # noqa: F401

from hf_lowmem import files
from hf_lowmem.drive_file import BLOCK, DriveError, DriveFull, EndOfFile, address
from hf_lowmem.files import PosixFile, filesystem, filesystem_in, open_file
from hf_lowmem.windows_files import END_OF_FILE, EXISTING, NEW, WindowsFile

# Where temporary files are in RAM or on an overlay, what is tested here is the same.
pytestmark = pytest.mark.filterwarnings("ignore:.*(is in RAM|no direct I/O):RuntimeWarning")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")


def memory(nbytes: int, value: int = 0) -> memoryview:
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = bytes([value]) * nbytes
    return view


def test_what_is_written_is_read(tmp_path) -> None:
    file = open_file(tmp_path / "data.bin", 4 * MIB)
    try:
        assert file.size() == 4 * MIB
        file.write(MIB, memory(MIB, 7))
        file.sync()
        back = memory(2 * MIB, 9)
        file.read(0, back)
        assert bytes(back) == bytes(MIB) + b"\7" * MIB
    finally:
        file.close()
    file.close()  # again is nothing
    file = open_file(tmp_path / "data.bin", 4 * MIB, create=False)
    back = memory(BLOCK)
    file.read(MIB, back)
    file.close()
    assert bytes(back) == b"\7" * BLOCK


@linux
def test_it_goes_past_the_page_cache_and_has_all_its_space(tmp_path) -> None:
    if filesystem(tmp_path) not in ("ext4", "xfs"):
        pytest.skip("needs a file system with direct I/O")
    file = open_file(tmp_path / "data.bin", 4 * MIB)
    assert file.direct
    assert os.stat(file.path).st_blocks * 512 >= 4 * MIB
    file.close()


@pytest.mark.parametrize(("offset", "nbytes", "shift"), [(1, BLOCK, 0), (0, 100, 0), (0, BLOCK, 8), (-BLOCK, BLOCK, 0)])
def test_places_that_are_no_whole_blocks_are_refused(tmp_path, offset, nbytes, shift) -> None:
    file = open_file(tmp_path / "data.bin", MIB)
    view = memory(2 * BLOCK)[shift : shift + nbytes]
    for call in (file.read, file.write):
        with pytest.raises(ValueError, match="multiples of 4096"):
            call(offset, view)
    file.close()
    with pytest.raises(ValueError, match="multiple of 4096"):
        open_file(tmp_path / "other", 100)


def named(error: pytest.ExceptionInfo, file: files.DriveFile, offset: int, wanted: int, got: int) -> str:
    """All that an error of a file must say."""
    text = str(error.value)
    for part in (file.path, f"wanted {wanted} bytes", f"offset {offset}", f"got {got}"):
        assert part in text
    assert (error.value.path, error.value.offset) == (file.path, offset)
    assert (error.value.wanted, error.value.got) == (wanted, got)
    return text


@linux
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("short", [BLOCK, BLOCK + 512, 3 * BLOCK + 1024])
def test_short_counts_are_gone_on_with(tmp_path, kind, short) -> None:
    file = FaultyFile(tmp_path / "data.bin", True)
    file.preallocate(MIB)
    file.direct = file.go_direct(True)
    file.calls.update(read=0, write=0)
    file.log.clear()
    file.faults[kind] = {1: short, 2: BLOCK, 3: short}
    data, back = memory(MIB), memory(MIB)
    data[:] = os.urandom(MIB)
    file.write(0, data)
    file.read(0, back)
    assert data == back
    assert file.calls[kind] == 4
    if file.direct:
        assert all(offset % BLOCK == 0 for _, offset, _ in file.log)
    file.close()


@linux
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize(
    ("fault", "expected", "way_out"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DriveFull, "Free space"),
        (OSError(errno.EIO, "Input/output error"), DriveError, "dmesg"),
        (OSError(errno.ENODEV, "No such device"), DriveError, "connect it"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), DriveFull, "quota"),
        (0, EndOfFile, "cut"),
        (512, EndOfFile, "cut"),
    ],
    ids=["full", "io", "gone", "quota", "nothing", "less than a block"],
)
def test_failures_say_where_and_how_to_go_on(tmp_path, kind, fault, expected, way_out) -> None:
    file = FaultyFile(tmp_path / "data.bin", True)
    file.preallocate(MIB)
    file.direct = True  # whole blocks, whatever the file system has
    file.calls.update(read=0, write=0)
    file.faults[kind] = {1: 2 * BLOCK, 2: fault}
    with pytest.raises(expected) as error:
        getattr(file, kind)(BLOCK, memory(8 * BLOCK))
    got = 2 * BLOCK + (fault if isinstance(fault, int) else 0)
    assert way_out in named(error, file, BLOCK, 8 * BLOCK, got)
    file.close()


def test_a_file_that_was_cut(tmp_path) -> None:
    file = open_file(tmp_path / "data.bin", MIB)
    os.truncate(file.path, 100 * 1024)
    with pytest.raises(EndOfFile) as error:
        file.read(0, memory(MIB))
    named(error, file, 0, MIB, 100 * 1024)
    file.close()
    with pytest.raises(EndOfFile, match="102400"):
        open_file(tmp_path / "data.bin", MIB, create=False)


def test_a_closed_file_says_so(tmp_path) -> None:
    file = open_file(tmp_path / "data.bin", MIB)
    file.close()
    with pytest.raises(DriveError, match="closed"):
        file.read(0, memory(BLOCK))


def test_files_that_are_there_or_not(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "data.bin", MIB, create=False)
    open_file(tmp_path / "data.bin", MIB).close()
    with pytest.raises(FileExistsError):
        open_file(tmp_path / "data.bin", MIB)
    assert (tmp_path / "data.bin").stat().st_size == MIB


@linux
def test_without_direct_io_one_warning_says_what_it_costs(tmp_path, monkeypatch) -> None:
    real = files.fcntl.fcntl

    def refuse(fd, command, flags=0):
        if command == files.fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, flags)

    monkeypatch.setattr(files.fcntl, "fcntl", refuse)
    with pytest.warns(RuntimeWarning, match="20 to 40 times the CPU time") as warned:
        file = open_file(tmp_path / "data.bin", MIB)
    assert len(warned) == 1
    assert not file.direct
    file.write(0, memory(MIB, 3))
    back = memory(MIB)
    file.read(0, back)
    assert back == memory(MIB, 3)
    file.close()


@linux
def test_a_file_system_that_refuses_only_the_first_direct_call(tmp_path, monkeypatch) -> None:
    calls = []

    def refuse_once(fd, buffers, offset):
        calls.append(offset)
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse_once)
        with pytest.warns(RuntimeWarning, match="no direct I/O"):
            file = open_file(tmp_path / "data.bin", MIB)
    assert calls == [0]
    file.read(0, memory(MIB))
    file.close()


@linux
def test_space_is_given_back_when_there_is_too_little(tmp_path) -> None:
    with mounted(tmp_path, 32 * MIB) as place:
        free = os.statvfs(place).f_bavail
        with pytest.raises(DriveFull) as error:
            open_file(place / "data.bin", 64 * MIB)
        assert str(64 * MIB) in str(error.value)
        assert os.listdir(place) == ["lost+found"]
        assert os.statvfs(place).f_bavail == free


def fill_up(place: Path) -> None:
    with open(place / "rest", "wb", buffering=0) as rest, contextlib.suppress(OSError):
        while True:
            rest.write(bytes(MIB))
    with open(place / "more", "wb", buffering=0) as more, pytest.raises(OSError, match="No space"):
        more.write(bytes(MIB))


@linux
def test_a_preallocated_file_is_overwritten_on_a_full_drive(tmp_path) -> None:
    with mounted(tmp_path, 32 * MIB) as place:
        file = open_file(place / "data.bin", 8 * MIB)
        fill_up(place)
        file.write(0, memory(8 * MIB, 5))
        file.sync()
        back = memory(8 * MIB)
        file.read(0, back)
        assert back == memory(8 * MIB, 5)
        file.close()


@linux
def test_btrfs_overwrites_in_place(tmp_path) -> None:
    with mounted(tmp_path, 128 * MIB, "btrfs") as place:
        assert filesystem(place) == "btrfs"
        file = open_file(place / "data.bin", 16 * MIB)
        fill_up(place)
        for value in range(3):
            file.write(0, memory(16 * MIB, value))
            file.sync()
        file.close()


@linux
def test_btrfs_that_will_not_write_in_place_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "filesystem", lambda path: "btrfs")
    monkeypatch.setattr(PosixFile, "overwrite_in_place", lambda self: False)
    with pytest.warns(RuntimeWarning, match=r"chattr \+C"):
        open_file(tmp_path / "data.bin", MIB).close()


@linux
def test_a_limit_on_the_size_of_files(tmp_path) -> None:
    code = (
        "import resource, sys; from hf_lowmem.files import open_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10 * 2**20, 10 * 2**20))\n"
        "try: open_file(sys.argv[1], 16 * 2**20)\n"
        "except OSError as error: print(type(error).__name__, error)"
    )
    result = python(code, tmp_path / "data.bin")
    assert "DriveError" in result.stdout
    assert "ulimit -f" in result.stdout
    assert str(16 * MIB) in result.stdout
    assert not (tmp_path / "data.bin").exists()


RUN = (
    "import sys, mmap; from hf_lowmem.files import open_file\n"
    "file = open_file(sys.argv[1], 8 * 2**20); data, back = (memoryview(mmap.mmap(-1, 8 * 2**20)) for _ in 'ab')\n"
    "data[:] = bytes(range(256)) * 2**15\n"
    "try: file.write(0, data); file.read(0, back); print('same' if data == back else 'other')\n"
    "except OSError as error: print(type(error).__name__, error)"
)


@linux
@pytest.mark.parametrize(
    ("variable", "fault", "answer"),
    [
        ("FAULT_WRITE", "2:short", ["same"]),
        ("FAULT_READ", "2:short", ["same"]),
        ("FAULT_WRITE", "2:28", ["DriveFull", "wanted 8388608 bytes at offset 0, got 0"]),
        ("FAULT_WRITE", "2:5", ["DriveError", "wanted 8388608 bytes at offset 0, got 0"]),
        ("FAULT_READ", "2:5", ["DriveError", "wanted 8388608 bytes at offset 0, got 0"]),
    ],
)
def test_faults_of_the_systems_own_calls(shim, tmp_path, variable, fault, answer) -> None:  # noqa: F811
    result = python(RUN, tmp_path / "data.bin", LD_PRELOAD=str(shim), **{variable: fault})
    assert all(part in result.stdout for part in answer), result
    assert ("cut 8388608" in result.stderr) == fault.endswith("short"), result


TABLE = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw - tmpfs tmpfs rw
31 22 0:40 / /mnt/my\040share rw - nfs4 server:/x rw
32 22 0:41 / /home/me rw - fuse.sshfs me@there rw
33 32 0:42 / /home/me/fast rw - xfs /dev/nvme0n1 rw
34 22 0:43 / /home/me/fast rw - btrfs /dev/nvme1n1 rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/x", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/dev/shmem", "ext4"),
        ("/mnt/my share/run", "nfs4"),
        ("/home/me/slow", "fuse.sshfs"),
        ("/home/me/fast/run", "btrfs"),
    ],
)
def test_file_systems_by_the_table_of_mounts(path, kind) -> None:
    assert filesystem_in(TABLE, path) == kind


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nfs4", "no local drive"),
        ("cifs", "no local"),
        ("9p", "no local"),
        ("fuse.sshfs", "no local"),
        ("tmpfs", "RAM"),
    ],
)
def test_what_is_no_local_drive_is_said_by_name(tmp_path, monkeypatch, kind, words) -> None:
    monkeypatch.setattr(files, "filesystem", lambda path: kind)
    with pytest.warns(RuntimeWarning, match=words) as warned:
        files.warn_of(tmp_path)
    assert kind in str(warned[0].message)


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "overlay", "fuseblk", ""])
def test_local_drives_give_no_warning(tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setattr(files, "filesystem", lambda path: kind)
    files.warn_of(tmp_path)


class FakeKernel:
    """kernel32's part for ``WindowsFile``, on another system: it refuses what Windows refuses."""

    def __init__(self) -> None:
        self.opened: dict[int, tuple[int, int]] = {}  # handle: its thread and its descriptor
        self.room = 2**40

    def open(self, path: str, disposition: int) -> int:
        assert disposition in (NEW, EXISTING)
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if disposition == NEW else 0))
        handle = 1000 + fd
        self.opened[handle] = (threading.get_ident(), fd)
        return handle

    def transfer(self, name: str, handle: int, where: int, nbytes: int, offset: int) -> int:
        thread, fd = self.opened[handle]
        assert thread == threading.get_ident()
        assert where % BLOCK == nbytes % BLOCK == offset % BLOCK == 0
        view = memoryview((ctypes.c_char * nbytes).from_address(where)).cast("B")
        if name == "ReadFile":
            return os.preadv(fd, [view], offset)
        if offset + nbytes > self.room:
            raise OSError(errno.ENOSPC, "There is not enough space on the disk")
        return os.pwrite(fd, view, offset)

    def set_size(self, handle: int, nbytes: int) -> None:
        os.ftruncate(self.opened[handle][1], nbytes)

    def flush(self, handle: int) -> None:
        os.fsync(self.opened[handle][1])

    def close(self, handle: int) -> None:
        os.close(self.opened.pop(handle)[1])


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="its kernel is played by POSIX")
def test_on_windows_each_thread_has_its_handle(tmp_path) -> None:
    kernel = FakeKernel()
    file = WindowsFile(tmp_path / "data.bin", True, kernel)
    file.preallocate(40 * MIB)
    assert file.size() == 40 * MIB
    assert os.stat(file.path).st_blocks * 512 >= 40 * MIB  # it has been written once

    def work(i: int) -> None:
        file.write(i * MIB, memory(MIB, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernel.opened) == 4
    back = memory(MIB)
    for i in range(1, 4):
        file.read(i * MIB, back)
        assert back == memory(MIB, i)
    file.sync()
    with pytest.raises(EndOfFile, match="got 0"):
        file.read(40 * MIB, back)
    file.close()
    assert not kernel.opened


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="its kernel is played by POSIX")
def test_on_windows_a_full_drive_is_known_at_the_start(tmp_path) -> None:
    kernel = FakeKernel()
    kernel.room = 20 * MIB
    file = WindowsFile(tmp_path / "data.bin", True, kernel)
    with pytest.raises(DriveFull) as error:
        file.preallocate(40 * MIB)
    assert "Free space" in str(error.value)
    assert file.size() == 0
    file.close()


@pytest.mark.skipif(sys.platform != "win32", reason="Windows's own")
def test_the_real_kernel(tmp_path) -> None:
    file = open_file(tmp_path / "data.bin", MIB)
    file.write(0, memory(MIB, 3))
    back = memory(MIB)
    file.read(0, back)
    assert back == memory(MIB, 3)
    file.close()
    assert END_OF_FILE == 38


def test_address_of_nothing() -> None:
    assert address(memory(BLOCK)[:0]) == 0
