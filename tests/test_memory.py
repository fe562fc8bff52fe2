"""The GPU's memory, as far as that can be seen without one. test_staging.py has the pinned host memory."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

from hf_lowmem import memory


@pytest.fixture
def said(monkeypatch):
    """What torch's allocator is told, on a plain Linux with nothing in the environment."""
    told = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    memory.use_expandable_segments.cache_clear()
    yield told
    memory.use_expandable_segments.cache_clear()


def test_expandable_segments(said) -> None:
    assert memory.use_expandable_segments()
    assert memory.use_expandable_segments()
    assert said == ["expandable_segments:True"]  # once


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("setting", "used", "told"),
    [
        ("expandable_segments:True", True, []),
        ("Expandable_Segments: False,max_split_size_mb:512", False, []),
        ("max_split_size_mb:512", True, ["max_split_size_mb:512,expandable_segments:True"]),
        ("backend:cudaMallocAsync", False, []),
    ],
)
def test_the_environment_has_the_last_word(said, monkeypatch, name, setting, used, told) -> None:
    monkeypatch.setenv(name, setting)
    assert memory.use_expandable_segments() is used
    assert said == told


def test_expandable_segments_where_there_are_none(said, monkeypatch) -> None:
    def refuse(settings: str) -> None:
        raise RuntimeError("unrecognized")

    for change in (
        lambda: monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse),
        lambda: monkeypatch.setattr(platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2"),
        lambda: monkeypatch.setattr(sys, "platform", "win32"),
    ):
        change()
        memory.use_expandable_segments.cache_clear()
        assert not memory.use_expandable_segments()
    assert said == []


@pytest.mark.gpu
def test_expandable_segments_on_a_gpu(monkeypatch) -> None:
    """Asked for when the GPU is in use already: what comes later lies in them."""
    kept = torch.empty(2**20, device="cuda")
    assert memory.use_expandable_segments()
    large = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    assert any(segment["is_expandable"] and segment["total_size"] >= large.nbytes for segment in segments)
    assert kept.numel() == 2**20
