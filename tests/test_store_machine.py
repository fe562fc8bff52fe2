"""A store against a dict, by a state machine."""

from __future__ import annotations

import os

import pytest
from faulty import empty, filled, value_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hf_lowmem.store import StaleRead, Store

# Where temporary files are in RAM or on an overlay, what is tested here is the same.
pytestmark = pytest.mark.filterwarnings("ignore:.*(is in RAM|no direct I/O):RuntimeWarning")


class AgainstADict(RuleBasedStateMachine):
    """Reads, writes, commits and crashes in any order, most of them not waited for."""

    folder: object

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(self.folder, {"a": 64 * 1024, "b": 8192, "c": 20480}, chunk=16384, threads_per_drive=3)
        self.now: dict[str, int] = {}
        self.committed: dict[str, int] | None = None
        self.count = 0
        self.reads: list = []

    @rule(key=st.sampled_from("abc"))
    def write(self, key) -> None:
        self.count += 1
        self.now[key] = self.count
        self.store.write(key, filled(self.store.extents[key], self.count), self.count)

    @rule(key=st.sampled_from("abc"))
    def read(self, key) -> None:
        buffer = empty(self.store.extents[key])
        self.reads.append((self.store.read(key, buffer, self.now.get(key)), buffer, self.now.get(key)))

    @rule()
    def wait_for_reads(self) -> None:
        for ticket, buffer, value in self.reads:
            if value is None:
                with pytest.raises(StaleRead):
                    ticket.wait(20)
            else:
                ticket.wait(20)
                assert value_of(buffer) == value
        self.reads.clear()

    @rule()
    def commit(self) -> None:
        self.count += 1
        self.store.commit(self.count)
        self.committed = dict(self.now)
        self.step = self.count

    @rule()
    def drain(self) -> None:
        self.store.drain(20)

    @precondition(lambda self: self.committed is not None)
    @rule(wait=st.booleans())
    def crash(self, wait) -> None:
        self.wait_for_reads()
        if wait:
            self.store.drain(20)
        self.store.close(keep=True)
        self.store = Store.open(self.folder, "")
        assert self.store.step == self.step
        self.now = dict(self.committed)

    @invariant()
    def has_the_step(self) -> None:
        assert self.store.step == (None if self.committed is None else self.step)

    def teardown(self) -> None:
        self.wait_for_reads()
        for key, value in self.now.items():
            buffer = empty(self.store.extents[key])
            self.store.read(key, buffer, value).wait(20)
            assert value_of(buffer) == value
        self.store.close()


def test_it_is_a_dict_that_is_set_back_by_crashes(tmp_path) -> None:
    machine = type("Machine", (AgainstADict,), {"folder": tmp_path})
    few = settings(max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=few)
    assert os.listdir(tmp_path) == []
