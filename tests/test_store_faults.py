"""What goes wrong with drives and processes, for real where it can be: an error that says all, a step that is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
import warnings

import pytest
from faulty import CHILD, MIB, empty, faulty, filled, mounted, python, shim, value_of  # noqa: F401

from hf_lowmem import files, keeper, manifest, store
from hf_lowmem.drive_file import DriveError, DriveFull, EndOfFile
from hf_lowmem.store import CannotResume, CorruptRead, Store, StoreClosed, StoreFailed

# Where temporary files are in RAM or on an overlay, what is tested here is the same.
pytestmark = pytest.mark.filterwarnings("ignore:.*(is in RAM|no direct I/O):RuntimeWarning")
N = 256 * 1024
KEYS = {"a": N, "b": N, "c": N}
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX's own")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")


def make(folder, **changes) -> Store:
    return Store(folder, **{"extents": KEYS, "chunk": 64 * 1024, "identity": "model", **changes})


def put(store: Store, step: int, keys=KEYS) -> None:
    for ticket in [store.write(key, filled(N, step), step) for key in keys]:
        ticket.wait()


def get(store: Store, key: str) -> int:
    buffer = empty(N)
    store.read(key, buffer).wait()
    return value_of(buffer)


def failing(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@linux
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ENODEV, errno.EROFS])
def test_after_a_write_that_failed_nothing_is_done(tmp_path, faulty, code) -> None:  # noqa: F811
    s = make(tmp_path)
    put(s, 1)
    s.commit(1)
    file = faulty[0]
    file.faults["write"] = {file.calls["write"] + 3: failing(code)}
    file.go.clear()
    tickets = [s.write(key, filled(N, 2), 2) for key in KEYS]
    file.go.set()
    with pytest.raises(DriveError) as first:
        tickets[0].wait()
    for part in ("'a'", file.path, f"wanted {64 * 1024} bytes", "offset", "got 0", os.strerror(code)):
        assert part in str(first.value)
    assert isinstance(first.value, DriveFull) == (code == errno.ENOSPC)
    for call in (lambda: get(s, "a"), lambda: put(s, 2), s.drain):
        with pytest.raises(StoreFailed, match="nothing is done since") as later:
            call()
        assert str(later.value.__cause__) == str(first.value)
    with pytest.raises(DriveError) as again:
        s.commit(2)
    assert str(again.value) == str(first.value)
    end = time.monotonic() + 10
    while not all(ticket.done() for ticket in tickets):
        assert time.monotonic() < end
    s.close(keep=True)
    faulty.clear()
    with Store.open(tmp_path, "model") as s:
        assert [get(s, key) for key in KEYS] == [1] * 3


@linux
def test_a_read_that_fails_once_is_tried_again(tmp_path, faulty) -> None:  # noqa: F811
    with make(tmp_path) as s:
        put(s, 1)
        faulty[0].faults["read"] = {1: failing(errno.EIO), 3: 0}
        assert get(s, "a") == 1
        assert s.stats().retries == 2


@linux
def test_a_read_that_fails_twice_harms_no_other(tmp_path, faulty) -> None:  # noqa: F811
    with make(tmp_path, threads_per_drive=1) as s:
        put(s, 1)
        faulty[0].faults["read"] = {1: failing(errno.EIO), 2: failing(errno.EIO)}
        with pytest.raises(DriveError, match=r"'a': reading .*store.bin: wanted 65536 bytes at offset 0, got 0.*dmesg"):
            get(s, "a")
        assert [get(s, key) for key in KEYS] == [1] * 3
        put(s, 2)
        s.commit(2)


@linux
def test_after_a_sync_that_failed_nothing_is_done(tmp_path, faulty) -> None:  # noqa: F811
    s = make(tmp_path)
    put(s, 1)
    s.commit(1)
    put(s, 2)
    faulty[0].faults["sync"] = {2: failing(errno.EIO)}
    with pytest.raises(OSError, match="Input/output error"):
        s.commit(2)
    with pytest.raises(StoreFailed):
        put(s, 3)
    assert s.step == 1
    s.close(keep=True)
    with Store.open(tmp_path, "model") as s:
        assert [get(s, key) for key in KEYS] == [1] * 3


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_manifest_that_cannot_be_published_ends_the_store(tmp_path, monkeypatch, call) -> None:
    s = make(tmp_path)
    put(s, 1)
    s.commit(1)
    put(s, 2)

    def fail(*arguments):
        raise failing(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(manifest.os, call, fail)
        with pytest.raises(OSError, match="Input/output error"):
            s.commit(2)
    with pytest.raises(StoreFailed):
        put(s, 3)
    s.close(keep=True)
    with Store.open(tmp_path, "model") as s:
        assert [get(s, key) for key in KEYS] == [1] * 3


def test_files_that_were_cut(tmp_path) -> None:
    s = make(tmp_path, threads_per_drive=1)
    put(s, 1)
    s.commit(1)
    os.truncate(s.paths[0] / "store.bin", 100_000)
    with pytest.raises(EndOfFile, match=r"wanted 65536 bytes at offset 65536, got 34464.*has been cut"):
        get(s, "a")
    s.close(keep=True)
    with pytest.raises(EndOfFile, match="the file has 100000"):
        Store.open(tmp_path, "model")


def flip(path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("offset", [0, 70_001, N - 1])
def test_a_flipped_bit_is_found_in_each_read(tmp_path, offset) -> None:
    pytest.importorskip("xxhash")
    with make(tmp_path, verify="always") as s:
        put(s, 1)
        s.drain()
        flip(s.paths[0] / "store.bin", offset)
        start = offset // 65536 * 65536
        with pytest.raises(CorruptRead, match=rf"'a': .*wanted 65536 bytes at offset {start}, got 65536 .*changed"):
            get(s, "a")
        assert get(s, "b") == 1
        with pytest.raises(CorruptRead):
            s.verify()
        put(s, 2)
        s.verify()
        assert get(s, "a") == 2


def test_a_flipped_bit_is_found_after_a_crash(tmp_path) -> None:
    pytest.importorskip("xxhash")
    s = make(tmp_path, verify="commit")
    put(s, 1)
    s.commit(1)
    flip(s.paths[0] / "store.bin", 2 * N + 5)  # b's first slot
    s.close(keep=True)
    s = Store.open(tmp_path, "model", verify="commit")
    assert get(s, "a") == 1
    with pytest.raises(CorruptRead, match="'b'"):
        get(s, "b")
    put(s, 2)
    s.commit(2)
    s.close(keep=True)
    with Store.open(tmp_path, "model", verify="commit") as s:
        assert [get(s, key) for key in KEYS] == [2] * 3


@pytest.mark.parametrize("verify", ["off", "commit"])
@pytest.mark.parametrize("written_since", [False, True])
def test_the_manifest_before_is_taken_only_if_its_step_is_whole(tmp_path, verify, written_since) -> None:
    if verify != "off":
        pytest.importorskip("xxhash")
    before = set(threading.enumerate())
    s = make(tmp_path, verify=verify)
    for step in (1, 2):
        put(s, step)
        s.commit(step)
    if written_since:
        put(s, 3, ["b"])  # where step 1 was
        s.drain()
    flip(s.paths[0] / "manifest-0.json", 20)  # generation 2
    s.close(keep=True)
    if verify == "off":
        with pytest.raises(CannotResume, match="two manifests"):
            Store.open(tmp_path, "model")
    elif written_since:
        with pytest.raises(CorruptRead, match="'b'"):
            Store.open(tmp_path, "model", verify="commit")
    else:
        with Store.open(tmp_path, "model", verify="commit") as s:
            assert s.step == 1
            assert [get(s, key) for key in KEYS] == [1] * 3
    assert {thread for thread in threading.enumerate() if "hf_lowmem" in thread.name} <= before


@linux
def test_a_drive_that_is_full_when_it_is_made(tmp_path, monkeypatch) -> None:
    """As when somebody else has taken what was free a moment ago."""
    with mounted(tmp_path, 16 * MIB) as place:
        big = {"extents": {"a": 32 * MIB}}
        with pytest.raises(DriveFull, match="are free"):
            make(place, **big)
        monkeypatch.setattr(store, "check_space", lambda needs: None)
        with pytest.raises(DriveFull, match=rf"preallocating .*store.bin: wanted {64 * MIB} bytes"):
            make(place, **big)
        assert os.listdir(place) == ["lost+found"]


@linux
def test_a_full_drive_does_not_stop_a_store_that_has_its_space(tmp_path) -> None:
    with mounted(tmp_path, 16 * MIB) as place, make(place) as s:
        with open(place / "rest", "wb", buffering=0) as rest, contextlib.suppress(OSError):
            while True:
                rest.write(bytes(4096))
        assert os.statvfs(place).f_bavail < 5  # KiB
        for step in range(1, 6):  # the room that was kept for a manifest is there
            put(s, step)
            s.commit(step)
        assert [get(s, key) for key in KEYS] == [5] * 3
        s.close(keep=True)
        with Store.open(place, "model") as again:
            assert again.step == 5
            assert [get(again, key) for key in KEYS] == [5] * 3


@linux
def test_a_manifest_that_finds_no_room(tmp_path) -> None:
    with mounted(tmp_path, 16 * MIB) as place, make(place) as s:
        put(s, 1)
        os.unlink(s.paths[0] / "reserve")
        with open(place / "rest", "wb", buffering=0) as rest, contextlib.suppress(OSError):
            while True:
                rest.write(bytes(4096))
        with pytest.raises(DriveFull, match=r"publishing .*manifest.tmp: wanted \d+ bytes at offset 0.*Free space"):
            s.commit(1)


@linux
def test_a_drive_that_disappears(tmp_path) -> None:
    with mounted(tmp_path, 16 * MIB) as place:
        s = make(place)
        put(s, 1)
        s.commit(1)
        os.truncate(tmp_path / "image", 0)
        with pytest.raises(DriveError, match=r"'a': reading .*store.bin.*Input/output error.*resume from the") as error:
            get(s, "a")
        assert (error.value.wanted, error.value.got) == (64 * 1024, 0)
        started = time.monotonic()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*remove it by hand", RuntimeWarning)
            s.close()
        assert time.monotonic() - started < 10


@linux
def test_a_drive_that_does_not_answer(tmp_path, faulty, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(keeper, "PATIENCE", 0.3)
    s = make(tmp_path)
    faulty[0].go.clear()
    tickets = [s.write(key, filled(N, 1), 1) for key in KEYS]
    s.close()
    for ticket in tickets:
        with pytest.raises(StoreClosed):
            ticket.wait(0)
    assert os.listdir(tmp_path) == []
    faulty[0].go.set()


FAULTY = (
    CHILD
    + """
s = make(sys.argv[1])
try:
    for step in (1, 2, 3):
        put(s, step)
        s.commit(step)
    for key in KEYS:
        s.read(key, empty(N)).wait()
    print("whole")
except OSError as error:
    first = error.__cause__ if isinstance(error, store.StoreFailed) else error
    print(type(first).__name__, first)
s.close(keep=True)
"""
)


@linux
@pytest.mark.parametrize(
    ("variable", "fault", "answer", "steps"),
    [
        # The first write is the one that tries whether the file takes direct calls, each step has twelve.
        ("FAULT_WRITE", "3:short", ["whole"], {3}),
        ("FAULT_WRITE", "16:28", ["DriveFull", "wanted 65536 bytes at offset", "got 0", "No space left"], {1}),
        ("FAULT_READ", "2:5", ["DriveError", "wanted 65536 bytes at offset", "got 0", "Input/output"], {3}),
    ],
)
def test_faults_of_the_systems_own_calls(shim, tmp_path, variable, fault, answer, steps) -> None:  # noqa: F811
    result = python(FAULTY, tmp_path, LD_PRELOAD=str(shim), **{variable: fault})
    assert all(part in result.stdout for part in answer), result
    assert ("cut 65536" in result.stderr) == fault.endswith("short"), result
    assert ("store.bin" in result.stdout) == ("whole" not in answer)
    with Store.open(tmp_path, "model") as s:
        assert s.step in steps
        assert {get(s, key) for key in KEYS} == {s.step}


@linux
def test_a_limit_on_the_size_of_files(tmp_path) -> None:
    limited = FAULTY.replace(
        "    for step in (1",
        "    import resource; put(s, 1); s.commit(1)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (N + 100 * 1024, -1))\n    for step in (1",
    )
    result = python(limited, tmp_path)
    assert all(part in result.stdout for part in ("DriveError", "store.bin", "wanted 65536", "ulimit -f")), result
    with Store.open(tmp_path, "model") as s:
        assert [get(s, key) for key in KEYS] == [1] * 3


def test_an_error_of_the_keepers_own_lets_nobody_wait(tmp_path, monkeypatch) -> None:
    with make(tmp_path) as s:
        monkeypatch.setattr(type(s._keeper), "_start", lambda self, operation: 1 / 0)
        ticket = s.write("a", filled(N, 1), 1)
        with pytest.raises((StoreFailed, ZeroDivisionError)):
            ticket.wait(10)


def test_a_file_that_cannot_be_opened_leaves_nothing(tmp_path, monkeypatch) -> None:
    def refuse(*arguments, **named):
        raise PermissionError(errno.EPERM, "on purpose")

    before = set(threading.enumerate())
    monkeypatch.setattr(store, "open_file", refuse)
    with pytest.raises(PermissionError, match="on purpose"):
        make(tmp_path)
    assert os.listdir(tmp_path) == []
    assert set(threading.enumerate()) <= before
    assert files.open_file is not refuse
