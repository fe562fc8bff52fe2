"""The benchmarks run, at a length that measures nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import save_tiny_model

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def in_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_quality_goes_on_where_it_was(tmp_path, monkeypatch):
    import finetune
    import quality

    monkeypatch.setattr(quality, "find_spec", lambda name: name != "torchao")  # which compiles for minutes
    for name, value in (("SEQ", 64), ("BATCH", 4), ("HELDOUT", 8)):
        monkeypatch.setattr(finetune, name, value)
    model = save_tiny_model(tmp_path / "model", hidden=64)  # wide enough for integer products
    losses, out = tmp_path / "losses.json", tmp_path / "out.md"
    for seeds in (["0"], ["0", "1"]):
        argv = ["quality.py", "--model", str(model), "--device", "cpu", "--steps", "1", "--seeds", *seeds]
        monkeypatch.setattr(sys, "argv", [*argv, "--losses", str(losses), "--out", str(out)])
        quality.main()
    found = json.loads(losses.read_text())
    assert found.keys() == {"0.0001", "1e-06"}
    assert all(found["0.0001"][recipe].keys() == {"0", "1"} for recipe in found["0.0001"])
    assert "| 4-bit, 24-bit master (default) |" in out.read_text()


def test_state_codes_of_the_format_are_the_librarys(monkeypatch):
    import state_codes

    from hf_lowmem import codec

    for bits, (m, v) in {4: ("powers of two less one", "E3M1"), 8: ("linear 8 bits", "E3M5")}.items():
        form = codec.STATES[bits]
        every = torch.arange(form.block, dtype=torch.int32).view(1, -1) % 2**bits
        data = form.pack(every, form.block)
        roots = (form.decode_root(data, form.block) / form.top).unique()
        torch.testing.assert_close(roots, torch.tensor(state_codes.V_CODES[v]))
        levels = (form.decode_m(data, form.block) / codec.LEVELS).unique()[1:]  # the least is no code that is written
        torch.testing.assert_close(levels, torch.tensor(state_codes.M_CODES[m]).unique())


def test_optimizer_speed(tmp_path, monkeypatch):
    import optimizer

    monkeypatch.setattr(optimizer, "SETTLE_S", 0.0)
    out = tmp_path / "out.md"
    argv = ["optimizer.py", "--values", "300000", "--threads", "2", "--rounds", "1", "--peer-values", "0"]
    monkeypatch.setattr(sys, "argv", [*argv, "--out", str(out)])
    threads = torch.get_num_threads()
    try:
        optimizer.main()
    finally:
        torch.set_num_threads(threads)
    assert "| LowBitAdamW 4-bit (default recipe) |" in out.read_text()


def test_long_run(monkeypatch):
    import long_run

    lost, ratio = long_run.run("4", seed=0, steps=3, lr=1e-3)
    assert 0 < lost < 10
    assert ratio == pytest.approx(1.0, abs=0.5)


def test_uneven_blocks():
    import uneven_blocks

    recipe = uneven_blocks.RECIPES["powers of two less one, E3M1 (4 bits)"]
    _, updates, largest, _ = uneven_blocks.run(recipe, 0.5, 20, quadratic=False)
    assert updates.isfinite().all()
    assert largest > 0


def test_streaming(tmp_path, monkeypatch):
    """On a "device" in RAM; what it asks CUDA for its own figures is made up."""
    import streaming

    cuda = {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 10**9,
        "max_memory_reserved": lambda: 10**9,
        "get_device_name": lambda: "none",
        "get_device_properties": lambda i: SimpleNamespace(total_memory=10**11),
        "set_per_process_memory_fraction": lambda share: None,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(streaming, "DEVICE", "cpu")
    monkeypatch.setitem(streaming.SHAPES, "1.2b", (64, 128, 3, 4, 2, True))
    out = tmp_path / "out.md"
    argv = ["streaming.py", "--size", "1.2b", "--seq", "8", "--batch", "2", "--vocabulary", "50", "--steps", "7"]
    argv += ["--runs", "cpu:forward", "cpu", "1/3:early", "cpu:activations", "cpu:micro=1", "cpu:parts=2"]
    argv += ["--out", str(out), "--trace", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    streaming.main()
    rows = [line.split("|") for line in out.read_text().splitlines() if line.startswith(("| none", "| cpu", "| 1/3"))]
    names = ["none:forward", "cpu:forward", "cpu", "1/3:early", "cpu:activations", "cpu:micro=1", "cpu:parts=2"]
    assert [row[1].strip() for row in rows] == names
    assert rows[0][5] == rows[1][5]  # the loss
    assert float(rows[2][5]) < float(rows[0][5])
    assert rows[2][5] == rows[4][5]
    assert float(rows[5][5]) == pytest.approx(float(rows[2][5]), rel=1e-3)
    assert float(rows[6][5]) < float(rows[0][5])
    assert (tmp_path / "1.2b-1of3-early.json").stat().st_size > 1000
    few = ["cpu:weights=int8", "cpu:weights=int8:bare:int8", "cpu:forward:weights=int4"]
    monkeypatch.setattr(sys, "argv", [*argv[: argv.index("--runs") + 1], *few, "--out", str(out)])
    streaming.main()
    rows = [line.split("|") for line in out.read_text().splitlines() if line.startswith(("| none", "| cpu"))]
    assert [row[1].strip() for row in rows] == ["none:forward", *few]
    assert float(rows[1][5]) < float(rows[0][5])
    assert float(rows[2][5]) < float(rows[0][5])


def test_free_point(tmp_path, monkeypatch):
    import free_point
    import streaming

    for module in (streaming, free_point):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(streaming, "reset_peaks", lambda: None)
    monkeypatch.setattr(free_point, "reset_peaks", lambda: None)
    monkeypatch.setattr(free_point, "SEQ", 8)
    monkeypatch.setitem(streaming.SHAPES, "1.2b", (64, 128, 3, 4, 2, True))
    out = tmp_path / "out.md"
    argv = ["free_point.py", "--size", "1.2b", "--vocabulary", "50", "--tokens", "8", "16", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--forms", "model", "int8", "--out", str(out)])
    free_point.main()
    text = out.read_text()
    assert "| tokens a step | resident | model | int8 |" in text
    assert "| 95% from |" in text
    resident, streamed = {2: 100.0, 4: 100.0, 8: 100.0}, {2: 50.0, 4: 90.0, 8: 100.0}
    assert free_point.point(resident, streamed, 0.95) == pytest.approx(6)
    assert free_point.point(resident, streamed, 0.5) == 2.0
    assert free_point.point(resident, {2: 50.0, 4: 60.0, 8: 70.0}, 0.95) is None


def test_integer_products(tmp_path, monkeypatch):
    import integer

    monkeypatch.setattr(integer, "SHAPES", {"1B": [(64, 96), (96, 64)]})
    out = tmp_path / "out.md"
    argv = ["integer.py", "--tokens", "10", "20", "--sizes", "1B", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    integer.main()
    text = out.read_text()
    assert text.count("| 20 | 96 | 64 |") == 2
    assert "| tokens | inputs | outputs | bf16 | int8, weight gradients in bf16 | int8 |" in text


def test_state_drive(tmp_path, monkeypatch) -> None:
    import state_drive

    out = tmp_path / "out.md"
    argv = ["state_drive.py", "--folder", str(tmp_path), "--parameters", "200e3", "--groups", "3", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--out", str(out)])
    state_drive.main()
    text = out.read_text()
    assert "3 groups of 0.1 M parameters" in text
    assert "| RAM |" in text
    assert "| files |" in text
    assert list(tmp_path.iterdir()) == [out]


def test_nvme(tmp_path, monkeypatch):
    if shutil.which("fio") is None or sys.platform != "linux":
        pytest.skip("needs fio on Linux")
    import nvme

    out = tmp_path / "out.md"
    argv = ["nvme.py", "--folder", str(tmp_path), "--extents", "4", "--extent", "2", "--chunk", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*argv, "--engine", "psync", "--out", str(out)])
    nvme.main()
    text = out.read_text()
    for kind in nvme.KINDS:
        assert text.count(f"| {kind} |") == 4
    assert os.listdir(tmp_path) == ["out.md"]


def test_nvme_without_fio_says_so(monkeypatch):
    import nvme

    monkeypatch.setattr(nvme.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["nvme.py"])
    with pytest.raises(SystemExit, match="fio is not installed"):
        nvme.main()
