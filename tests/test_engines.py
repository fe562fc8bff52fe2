"""Which module computes: the fast one only where it can be had and is right."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest

from hf_lowmem.engines import proven

FAST, REFERENCE = ModuleType("fast"), ModuleType("reference")


def test_the_fast_one_where_it_is_right() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert proven(lambda: FAST, lambda engine: None, REFERENCE, "{reason}") is FAST


def test_the_reference_where_it_is_not() -> None:
    with pytest.warns(RuntimeWarning, match="slow, for it is wrong"):
        assert proven(lambda: FAST, lambda engine: "it is wrong", REFERENCE, "slow, for {reason}") is REFERENCE


@pytest.mark.parametrize("where", ["load", "try"])
def test_the_reference_where_it_cannot_be_had(where) -> None:
    def fail(*args: object) -> None:
        raise ImportError("no such module")

    load, wrong = (fail, lambda engine: None) if where == "load" else (lambda: FAST, fail)
    with pytest.warns(RuntimeWarning, match="slow, for ImportError: no such module"):
        assert proven(load, wrong, REFERENCE, "slow, for {reason}") is REFERENCE
