"""What the tests of the Hugging Face doors share: a tiny Llama, a tiny data set, and a training run in one call."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if find_spec("torch"):  # some of the tests run without
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, whoever does it
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent


def make_model(seed: int = 0, dtype: str = "float32", **changes):
    """A Llama of 90,432 parameters: q, o and mlp weights have 4,096 values or more and so get low-bit states."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes})).to(getattr(torch, dtype))


def make_data(samples: int = 32, length: int = 16):
    import torch

    tokens = torch.randint(3, 128, (samples, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_args(folder, **changes):
    from transformers import TrainingArguments

    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
    }
    return TrainingArguments(**{**settings, **changes})


def fit(trainer_class, folder, model=None, resume=None, trainer=None, **changes):
    """Trains and returns the Trainer; ``trainer`` holds its arguments, ``changes`` those of TrainingArguments."""
    args = make_args(folder, **changes)
    given = {"train_dataset": make_data(), **(trainer or {})}
    made = trainer_class(model=make_model() if model is None else model, args=args, **given)
    made.train(resume_from_checkpoint=resume)
    return made


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal_bits(one, other) -> bool:
    import torch

    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def run_python(code: str, *argv: str, cwd=None, check: bool = True, **env: str):
    """Runs ``code`` in a new interpreter that finds this checkout; returns the CompletedProcess."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def tiny():
    """The functions of this file, and one thread for torch: two threads on a busy machine are ten times slower here."""
    import torch

    torch.set_num_threads(1)
    return SimpleNamespace(
        model=make_model,
        data=make_data,
        args=make_args,
        fit=fit,
        weights=weights,
        equal_bits=equal_bits,
        python=run_python,
        root=ROOT,
    )


@pytest.fixture
def memory(monkeypatch):
    """A "device" in host memory whose bytes are counted, under every Trainer; see counted_memory.py."""
    from counted_memory import count

    return count(monkeypatch)
