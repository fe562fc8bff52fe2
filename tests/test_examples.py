"""Every example runs, as a user would run it, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import save_text, save_tiny_model
from transformers import AutoModelForCausalLM

import hf_lowmem

INSTALLED = Path(hf_lowmem.__file__).parent.parent  # the scripts shall use the package that this process uses
EXAMPLES = Path(__file__).parent.parent / "examples"
TRAINER = ["--output_dir", "{out}", "--max_steps", "2", "--learning_rate", "1e-2", "--report_to", "none"]
TRAINER += ["--save_strategy", "no", "--use_cpu", "--block", "32"]
COMMANDS = {
    "finetune.py": [*TRAINER, "--optim", "cpu_adam4bit", "--optim_args", "seed=3,threads=1"],
    "finetune_lowmem_trainer.py": [*TRAINER, "--state_bits", "8", "--threads", "1"],
    "accelerate_loop.py": ["--output", "{out}", "--steps", "2", "--block", "32", "--accumulate", "2", "--lr", "1e-2"],
}


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(INSTALLED), "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_example_has_a_command() -> None:
    assert sorted(COMMANDS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(COMMANDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_example(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = save_tiny_model(tmp_path / "model", dtype)
    text = save_text(tmp_path / "text.txt")
    out = tmp_path / "out"
    flags = [flag.format(out=out) for flag in COMMANDS[name]]
    command = [sys.executable, str(EXAMPLES / name), "--model", str(model), "--text", str(text), *flags]
    run(command, tmp_path)
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (model, out))
    assert before.keys() == after.keys()
    assert all(after[key].dtype is dtype for key in after)
    assert any(not torch.equal(before[key], after[key]) for key in after)


def test_finetune_from_yaml(tmp_path: Path) -> None:
    model, text, out = save_tiny_model(tmp_path / "model"), save_text(tmp_path / "text.txt"), tmp_path / "out"
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        f"model: {model}\ntext: [{text}]\nblock: 32\noutput_dir: {out}\nmax_steps: 1\noptim: cpu_adam8bit\n"
        "optim_args: seed=1\nreport_to: none\nsave_strategy: 'no'\nuse_cpu: true\n"
    )
    command = [sys.executable, str(EXAMPLES / "finetune.py"), str(settings)]
    run(command, tmp_path)
    assert (out / "model.safetensors").exists()
