"""Processes that are killed, interrupted, forked or at their end while a store is at work."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from faulty import CHILD, empty, python, value_of

from hf_lowmem.store import Store

# Where temporary files are in RAM or on an overlay, what is tested here is the same.
pytestmark = pytest.mark.filterwarnings("ignore:.*(is in RAM|no direct I/O):RuntimeWarning")
N = 256 * 1024
KEYS = {"a": N, "b": N, "c": N}
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX's own")


def get(store: Store, key: str) -> int:
    buffer = empty(N)
    store.read(key, buffer).wait()
    return value_of(buffer)


# One process that forks: so each of the many that are killed need not import torch anew.
KILLED = (
    CHILD
    + """
import random
folders, kills, slots = sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
choice = random.Random(0)
whole = refused = behind = 0

def train(report, s):
    step = s.step or 0
    while True:
        step += 1
        put(s, step)
        s.commit(step)
        os.write(report, b"%d\\n" % step)

for kill in range(kills):
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(theirs, Store.open(folders, "model") if kill and slots == 2 else make(folders, slots=slots))
        finally:
            os._exit(9)
    os.close(theirs)
    last = int(os.read(ours, 100).split()[-1])
    time.sleep(choice.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    last = int(([last] + os.read(ours, 100000).split())[-1])
    os.close(ours)
    try:
        s = Store.open(folders, "model")
    except store.CannotResume as error:
        assert slots == 1 and "one slot" in str(error), error
        refused += 1
        continue
    seen = set()
    for key in KEYS:
        buffer = empty(N)
        s.read(key, buffer, s.step).wait()
        seen.add(value_of(buffer))
    assert seen == {s.step}, (seen, s.step)
    assert last <= s.step <= last + 1, (last, s.step)
    whole += 1
    s.close(keep=True)
print("whole", whole, "refused", refused)
"""
)


@posix
@pytest.mark.parametrize("slots", [2, 1])
def test_killed_at_any_moment_one_whole_step_is_left(tmp_path, slots) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    kills = 30 if slots == 2 else 8
    result = python(KILLED, *folders, kills, slots)
    if slots == 2:
        assert result.stdout == f"whole {kills} refused 0\n", result
    else:
        words = result.stdout.split()
        assert int(words[1]) + int(words[3]) == kills, result
        assert int(words[3]) > 0, result  # not each time was it between two steps


INTERRUPTED = (
    CHILD
    + """
from faulty import FaultyFile
slow = threading.Event()
class Slow(FaultyFile):
    def _write_some(self, buffer, offset):
        if slow.is_set(): time.sleep(0.05)
        return super()._write_some(buffer, offset)
files.PosixFile = Slow
s = make(sys.argv[1], threads_per_drive=1)
put(s, 1)
s.commit(1)
slow.set()
interrupts = 0
def interrupt():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
for step, wait in ((2, "ticket"), (3, "drain"), (4, "commit")):
    tickets = [s.write(key, filled(N, step), step) for key in KEYS]
    threading.Thread(target=interrupt).start()
    try:
        {"ticket": tickets[-1].wait, "drain": s.drain, "commit": lambda: s.commit(step)}[wait]()
    except KeyboardInterrupt:
        interrupts += 1
    for ticket in tickets: ticket.wait()
    for key in KEYS:
        buffer = empty(N)
        s.read(key, buffer, step).wait()
        assert value_of(buffer) == step
put(s, 5)
s.drain()
print("interrupts", interrupts, "step", s.step)
s.close(keep=True)
"""
)


@posix
def test_an_interrupt_loses_no_write_and_no_commit(tmp_path) -> None:
    result = python(INTERRUPTED, tmp_path)
    assert result.stdout == "interrupts 3 step 4\n", result
    with Store.open(tmp_path, "model") as s:
        assert [get(s, key) for key in KEYS] == [4] * 3


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise RuntimeError('on purpose')", "del s"])
def test_the_end_of_the_interpreter_removes_it(tmp_path, end) -> None:
    code = CHILD + f"s = make(sys.argv[1])\nfor key in KEYS: s.write(key, filled(N, 1), 1)\n{end}"
    result = python(code, tmp_path)
    assert result.returncode == {"p": 0, "s": 3, "r": 1, "d": 0}[end[0]], result
    assert ("on purpose" in result.stderr) == end.startswith("raise")
    assert "Exception ignored" not in result.stderr
    assert os.listdir(tmp_path) == []


FORKED = (
    CHILD
    + """
s = make(sys.argv[1])
put(s, 1)
pid = os.fork()
if pid == 0:
    for call in (lambda: s.read("a", empty(N)), s.drain, lambda: s.commit(2)):
        try: call()
        except RuntimeError as error: print("child:", error, flush=True)
    s.close()
    del s
    sys.exit(0)
print(os.waitpid(pid, 0)[1])
buffer = empty(N)
s.read("a", buffer, 1).wait()
print("parent:", value_of(buffer), flush=True)
pid = os.fork()
if pid == 0:  # outlives its parent, and does not hold the lock
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
s.commit(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@posix
def test_a_fork_has_no_part_in_it(tmp_path) -> None:
    result = python(FORKED, tmp_path)
    lines = result.stdout.splitlines()
    assert len([line for line in lines if line.startswith("child: this store is another process's")]) == 3, result
    assert "0" in lines
    assert "parent: 1" in lines
    try:
        with Store.open(tmp_path, "model") as s:
            assert get(s, "a") == 1
    finally:
        os.kill(int(lines[-1]), signal.SIGKILL)
