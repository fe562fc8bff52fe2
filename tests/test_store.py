"""A store: order, versions, slots and steps, whose folder is whose, and what is left when it is gone."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings

import pytest
import torch
from faulty import MIB, FaultyFile, descriptors, empty, faulty, filled, mounted, value_of  # noqa: F401

from hf_lowmem.folders import leftovers
from hf_lowmem.manifest import BLOCK, lay_out
from hf_lowmem.store import CannotResume, DriveFull, FolderInUse, StaleRead, Store, StoreClosed

# Where temporary files are in RAM or on an overlay, what is tested here is the same.
pytestmark = pytest.mark.filterwarnings("ignore:.*(is in RAM|no direct I/O):RuntimeWarning")
N = 128 * 1024
KEYS = {"a": N, "b": 2 * N, "c": N + BLOCK, "d": BLOCK}


@pytest.fixture
def folders(tmp_path):
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    return places


def make(folders, **changes) -> Store:
    return Store(
        folders, **{"extents": KEYS, "chunk": 32 * 1024, "threads_per_drive": 2, "identity": "model", **changes}
    )


def put(store: Store, step: int, keys=KEYS) -> None:
    for ticket in [store.write(key, filled(KEYS[key], step), step) for key in keys]:
        ticket.wait()


def get(store: Store, key: str, version: int | None = None) -> int:
    buffer = empty(KEYS[key])
    store.read(key, buffer, version).wait()
    return value_of(buffer)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("verify", ["off", "always"])
def test_what_is_written_is_read(folders, slots, drives, verify) -> None:
    if verify != "off":
        pytest.importorskip("xxhash")
    with make(folders[:drives], slots=slots, verify=verify) as store:
        for step in range(1, 6):
            put(store, step)
            assert [get(store, key, step) for key in KEYS] == [step] * 4
            if step % 2:
                store.commit(step)
                assert store.step == step
        assert [store.version(key) for key in KEYS] == [5] * 4
        traffic = store.stats()
        assert traffic.bytes_read == traffic.bytes_written == 5 * sum(KEYS.values())
        assert traffic.write_s > 0
        assert sum(store.stats(d).bytes_read for d in range(drives)) == traffic.bytes_read
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_extents_are_shared_out_and_never_overlap() -> None:
    sizes = {"a": 100 * BLOCK, "b": BLOCK, "c": 7 * BLOCK}
    placed, files = lay_out(sizes, [3.0, 1.0], 2, 4, 4 * MIB)
    taken: list[set[int]] = [set(), set()]
    for key, extent in placed.items():
        assert sum(extent.segments) == sizes[key]
        for slot in range(2):
            bytes_of = set()
            for drive in range(2):
                for offset, first, nbytes in extent.pieces(drive, slot):
                    assert offset % BLOCK == first % BLOCK == nbytes % BLOCK == 0
                    blocks = set(range(offset, offset + nbytes, BLOCK))
                    assert not blocks & taken[drive]
                    taken[drive] |= blocks
                    bytes_of |= set(range(first, first + nbytes, BLOCK))
            assert bytes_of == set(range(0, sizes[key], BLOCK))
    assert placed["a"].segments == (75 * BLOCK, 25 * BLOCK)
    assert [max(blocks) + BLOCK for blocks in taken] == list(files)


def test_a_shared_segment_is_cut_for_all_threads_within_bounds() -> None:
    placed, _ = lay_out({"large": 400 * MIB, "middle": 12 * MIB, "small": MIB}, [1, 1], 1, 4, 16 * MIB)
    assert [placed[key].piece for key in ("large", "middle", "small")] == [16 * MIB, 1.5 * MIB, MIB]


def test_reads_see_writes_that_are_pending(folders, faulty) -> None:  # noqa: F811
    with make(folders[:1]) as store:
        faulty[0].go.clear()
        tickets, buffers = [], []
        for step in range(1, 5):
            tickets.append(store.write("a", filled(N, step), step))
            buffers.append(empty(N))
            tickets.append(store.read("a", buffers[-1], step))
        with pytest.raises(TimeoutError, match=r"writing 'a' is not done within 0.01 s, and goes on"):
            tickets[0].wait(0.01)
        assert not any(ticket.done() for ticket in tickets)
        with pytest.raises(TimeoutError, match="draining"):
            store.drain(0.01)
        faulty[0].go.set()
        store.drain()
        assert all(ticket.done() for ticket in tickets)
        assert [value_of(buffer) for buffer in buffers] == [1, 2, 3, 4]


def order(file: FaultyFile, store: Store) -> list[tuple[str, str]]:
    """Which extents the calls on a file were for, in their order, each once."""
    found = []
    for kind, offset, _ in file.log:
        for key, extent in store._keeper.manifest.extents.items():
            if extent.offsets[0] <= offset < extent.offsets[0] + 2 * extent.segments[0] and (kind, key) not in found:
                found.append((kind, key))
    return found


def test_reads_go_first_and_so_do_writes_that_one_waits_for(folders, faulty) -> None:  # noqa: F811
    with make(folders[:1], threads_per_drive=1) as store:
        put(store, 1)
        file = faulty[0]
        file.log.clear()
        file.go.clear()
        store.write("d", filled(BLOCK, 2), 2)
        while not file.log:  # the only thread is at it
            time.sleep(0.001)
        store.write("a", filled(N, 2), 2)
        store.write("b", filled(2 * N, 2), 2)
        read_c, read_b = empty(N + BLOCK), empty(2 * N)
        store.read("c", read_c, 1)
        store.read("b", read_b, 2)
        file.go.set()
        store.drain()
        expected = [("write", "d"), ("read", "c"), ("write", "b"), ("read", "b"), ("write", "a")]
        assert sorted(order(file, store)) == sorted(expected)
        position = order(file, store).index
        assert position(("read", "c")) < position(("write", "a"))
        assert position(("write", "b")) < position(("write", "a"))
        assert (value_of(read_c), value_of(read_b)) == (1, 2)


def test_versions_are_compared(folders) -> None:
    with make(folders) as store:
        with pytest.raises(StaleRead, match="'a' is read, but has never been written"):
            get(store, "a")
        put(store, 3, ["a"])
        with pytest.raises(StaleRead, match="read as version 4; the store has version 3"):
            get(store, "a", 4)
        with pytest.raises(ValueError, match="version 2 over version 3"):
            put(store, 2, ["a"])
        put(store, 3, ["a"])
        assert get(store, "a", 3) == 3


def test_any_number_of_reads_may_wait_and_be_refused(folders, faulty) -> None:  # noqa: F811
    with make(folders[:1]) as store:
        faulty[0].go.clear()
        store.write("d", filled(BLOCK, 1), 1)
        buffer = empty(BLOCK)
        tickets = [store.read("d", buffer, 7) for _ in range(2000)]
        last = store.read("d", buffer, 1)
        faulty[0].go.set()
        for ticket in tickets:
            with pytest.raises(StaleRead):
                ticket.wait(20)
        last.wait(20)
        assert value_of(buffer) == 1


def test_what_has_no_checksums_cannot_be_verified(folders) -> None:
    pytest.importorskip("xxhash")
    store = make(folders)
    put(store, 1)
    store.commit(1)
    store.close(keep=True)
    with Store.open(folders, "model", verify="commit") as store:
        assert get(store, "a", 1) == 1
        with pytest.raises(ValueError, match="written without checksums"):
            store.verify()
        put(store, 2)
        store.verify()


def test_arguments_are_checked_at_once(folders) -> None:
    with make(folders) as store:
        with pytest.raises(KeyError, match="no extent 'z'"):
            store.read("z", empty(N))
        with pytest.raises(ValueError, match="'a' has 131072 bytes, the buffer 4096"):
            store.write("a", empty(BLOCK), 1)
        with pytest.raises(ValueError, match="take BufferPool's"):
            store.write("a", torch.empty(N + 1, dtype=torch.uint8)[1:], 1)
        with pytest.raises(ValueError, match="keeps no checksums"):
            store.verify()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extents": {}}, "positive multiples"),
        ({"extents": {"a": 100}}, "'a': 4096"),
        ({"slots": 3}, "slots=3"),
        ({"chunk": 1000}, "chunk=1000"),
        ({"threads_per_drive": 0}, "threads_per_drive=0"),
        ({"shares": [1.0]}, "each of 2 folders"),
        ({"shares": [1.0, 0.0]}, "positive number"),
        ({"verify": "never"}, "verify='never'"),
        ({"leftovers": "burn"}, "leftovers='burn'"),
    ],
)
def test_settings_are_checked_before_anything_is_made(folders, changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        make(folders, **changes)
    assert os.listdir(folders[0]) == []


def test_checksums_without_their_library_say_what_to_install(folders, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"hf_lowmem\[nvme\]"):
        make(folders, verify="commit")


def test_tickets_call_back_when_they_are_done(folders) -> None:
    with make(folders) as store:
        called = threading.Event()
        ticket = store.write("a", filled(N, 1), 1)
        ticket.then(called.set)
        assert called.wait(10)
        again = threading.Event()
        ticket.wait()
        ticket.then(again.set)
        assert again.is_set()


def test_a_kept_store_goes_on_at_its_last_commit(folders) -> None:
    store = make(folders)
    put(store, 1)
    store.commit(1)
    put(store, 2, ["a", "b"])
    store.commit(2)
    for step in (3, 4):
        put(store, step)
    assert get(store, "c") == 4
    store.close(keep=True)
    store = Store.open(folders, "model")
    assert store.step == 2
    assert {key: get(store, key) for key in KEYS} == {"a": 2, "b": 2, "c": 1, "d": 1}
    assert store.version("c") == 1
    put(store, 3)
    store.commit(3)
    put(store, 4)
    store.close(keep=True)
    with Store.open(folders, "model") as store:
        assert {key: get(store, key, 3) for key in KEYS} == dict.fromkeys(KEYS, 3)
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_writes_behind_a_commit_wait_for_it(folders, faulty) -> None:  # noqa: F811
    """They would otherwise go to the slot that the step before it is in."""
    with make(folders[:1], threads_per_drive=6) as store:
        put(store, 1)
        store.commit(1)
        faulty[0].go.clear()
        store.write("a", filled(N, 2), 2)
        commits = threading.Thread(target=store.commit, args=(2,))
        commits.start()
        while not store._keeper._commits:
            time.sleep(0.001)
        later, buffer = store.write("a", filled(N, 3), 3), empty(N)
        read = store.read("a", buffer, 3)
        other = get(store, "b", 1)  # is not held up
        assert other == 1
        assert not later.done()
        faulty[0].go.set()
        commits.join()
        read.wait()
        assert value_of(buffer) == 3
        assert store.step == 2
        store.close(keep=True)
    with Store.open(folders[:1], "model") as store:
        assert get(store, "a") == 2


def test_one_slot_takes_half_and_refuses_what_is_of_two_steps(folders) -> None:
    sizes = {}
    for slots in (1, 2):
        with make(folders, slots=slots) as store:
            sizes[slots] = sum((path / "store.bin").stat().st_size for path in store.paths)
    assert sizes[2] == 2 * sizes[1] == 2 * sum(KEYS.values())
    store = make(folders, slots=1)
    put(store, 1)
    store.commit(1)
    store.close(keep=True)
    store = Store.open(folders, "model")
    assert get(store, "a", 1) == 1
    put(store, 2, ["a"])
    store.close(keep=True)
    with pytest.raises(CannotResume, match="one slot, and the step after 1 had begun"):
        Store.open(folders, "model")
    with make(folders, slots=1):  # which cleans
        pass
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_what_cannot_be_taken_up_says_why(folders, tmp_path) -> None:
    with pytest.raises(CannotResume, match="has 0 stores of 'model'"):
        Store.open(folders, "model")
    make(folders).close(keep=True)
    with pytest.raises(CannotResume, match=r"no step .* was committed"):
        Store.open(folders, "model")
    with pytest.raises(CannotResume, match=r"of others {'.*': 'model'}"):
        Store.open(folders, "another")
    store = make(folders)
    put(store, 1)
    store.commit(1)
    store.close(keep=True)
    for wrong in (folders[::-1], folders[:1]):
        with pytest.raises(CannotResume):
            Store.open(wrong, "model")
    second = make(folders, leftovers="keep")
    put(second, 7)
    second.commit(7)
    with Store.open(folders, "model") as store:  # the living one is none that was left
        assert store.step == 1
        store.close(keep=True)
    second.close(keep=True)
    with pytest.raises(CannotResume, match="has 2 stores"):
        Store.open(folders, "model")
    name = second.paths[0].name.removeprefix("hf_lowmem-")
    with Store.open(folders, "model", name=name) as store:
        assert store.step == 7


def test_two_in_one_folder_never_meet(folders) -> None:
    with make(folders) as first:
        put(first, 1)
        with make(folders) as second:
            put(second, 2)
            assert [get(first, key) for key in KEYS] == [1] * 4
            assert [get(second, key) for key in KEYS] == [2] * 4
            assert len(os.listdir(folders[0])) == 2
            assert leftovers(folders[0]) == []
        assert [get(first, key) for key in KEYS] == [1] * 4


def test_leftovers_are_cleaned_kept_or_refused_and_foreign_folders_stay(folders) -> None:
    foreign = folders[0] / "hf_lowmem-0123456789abcdef"
    foreign.mkdir()
    (foreign / "store.bin").write_text("mine")
    (foreign / "manifest-0.json").write_text("{}")
    (foreign / "lock").write_text("")
    store = make(folders)
    left = store.paths
    store.close(keep=True)
    (left[1] / "notes.txt").write_text("somebody's")
    with pytest.raises(FolderInUse, match=r"left: .*(step None of 'model')"):
        make(folders, leftovers="refuse")
    make(folders, leftovers="keep").close()
    assert left[0].exists()
    with pytest.warns(RuntimeWarning, match="remove it by hand"):
        make(folders).close()
    assert os.listdir(folders[0]) == [foreign.name]
    assert os.listdir(left[1]) == ["notes.txt"]
    assert (foreign / "store.bin").read_text() == "mine"


def test_missing_folders_and_files(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="mkdir"):
        make(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is no folder"):
        make(tmp_path / "file")
    with pytest.raises(ValueError, match="same folder"):
        make([tmp_path, tmp_path / "." / ""])
    with pytest.raises(ValueError, match="needs a folder"):
        make([])


def test_a_read_only_folder(tmp_path) -> None:
    with mounted(tmp_path, MIB, "tmpfs", "ro") as place, pytest.raises(PermissionError, match="read-only"):
        make(place)


@pytest.mark.parametrize("name", ["with spaces  in it", "Jörgs 模型 ドライブ", 'it\'s 100% "new"'])
def test_names_of_folders(tmp_path, name) -> None:
    if sys.platform == "win32" and '"' in name:
        pytest.skip("not a name there")
    (tmp_path / name).mkdir()
    store = make(tmp_path / name, identity=name)
    put(store, 1)
    store.commit(1)
    store.close(keep=True)
    with Store.open(tmp_path / name, name) as store:
        assert get(store, "a", 1) == 1


def test_a_relative_folder_is_where_it_was(folders, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with make("one") as store:
        assert store.paths[0].parent == folders[0]
        monkeypatch.chdir("/")
        put(store, 1)
        store.commit(1)
    with pytest.raises(FileNotFoundError, match=r"no folder nowhere \(/nowhere\)"):
        make("nowhere")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a folder in RAM")
def test_a_folder_in_ram_gives_a_warning() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            make(folder).close()
        assert "tmpfs" in str(said[0].message)


def test_too_little_space_is_known_before_anything_is_written(folders) -> None:
    with pytest.raises(DriveFull, match="add a folder on another drive") as error:
        make(folders, extents={"a": 2**50})
    assert str(folders[1]) in str(error.value)
    assert [os.listdir(folder) for folder in folders] == [[], []]


@pytest.mark.skipif(sys.platform != "linux", reason="counts by Linux's table")
def test_nothing_is_left_when_it_is_closed(folders) -> None:
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        store = make(folders)
        put(store, 1)
        pending = store.write("a", filled(N, 2), 2)
        store.close()
        store.close()
        assert pending.done()
        with pytest.raises(StoreClosed):
            store.write("a", filled(N, 2), 2)
        with pytest.raises(StoreClosed):
            store.commit(2)
    assert descriptors() <= before
    assert threading.active_count() == threads


def test_one_that_nobody_has_any_more_goes_away(folders) -> None:
    store = make(folders)
    path = store.paths[0]
    del store
    end = time.monotonic() + 20
    while path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert os.listdir(folders[0]) == []
