"""Loops of one's own on Accelerate, its launcher, and scripts that do not import this package."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

from hf_lowmem import LowBitAdamW, LowMemConfig, create_optimizer


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loop(accelerator, model, optimizer, data, steps=4):
    for _, batch in zip(range(steps), data, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def state_bits(optimizer):
    return copy.deepcopy(optimizer.state_dict())["state"]


def same_states(one, other):
    assert one.keys() == other.keys()
    return all(
        torch.equal(value, other[i][key]) if isinstance(value, torch.Tensor) else value == other[i][key]
        for i, state in one.items()
        for key, value in state.items()
    )


def test_a_loop_of_ones_own(tiny, accelerator):
    """Against the same loop with torch's AdamW, with the tolerance of tests/test_trainer.py."""
    ends = []
    for ours in (True, False):
        model = tiny.model()
        if ours:
            optimizer = create_optimizer(model, LowMemConfig(state_bits=32, master_bits=32), lr=1e-3, weight_decay=0.1)
        else:
            decay = [p for p in model.parameters() if p.ndim > 1]
            rest = [p for p in model.parameters() if p.ndim == 1]
            groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=1e-3)
        model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(tiny.data(), batch_size=2))
        loop(accelerator, model, optimizer, data)
        ends.append(tiny.weights(model))
    for name, wanted in ends[1].items():
        ulp = wanted.abs().max().item() * torch.finfo(wanted.dtype).eps
        assert (ends[0][name] - wanted).abs().max().item() <= 64 * ulp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prepare_leaves_packed_states_unharmed(tiny, accelerator, dtype):
    """Accelerate's wrapper puts the state dict through a round trip whenever it is made."""
    model = tiny.model(dtype=dtype)
    inner = create_optimizer(model, LowMemConfig(), lr=1e-3)
    optimizer, data = accelerator.prepare(inner, DataLoader(tiny.data(), batch_size=2))
    loop(accelerator, model, optimizer, data)
    before = state_bits(inner)
    assert {state["m"].dtype for state in before.values() if state["bits"] == 4} == {torch.uint8}
    again = accelerator.prepare(inner)
    assert again is not optimizer
    assert same_states(before, state_bits(again))
    loop(accelerator, model, again, data)


def test_save_and_load_state(tiny, accelerator, tmp_path):
    model = tiny.model(dtype="bfloat16")
    optimizer = create_optimizer(model, LowMemConfig(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(tiny.data(), batch_size=2))
    loop(accelerator, model, optimizer, data)
    accelerator.save_state(str(tmp_path))
    loop(accelerator, model, optimizer, data)
    wanted, states = tiny.weights(model), state_bits(optimizer)
    accelerator.load_state(str(tmp_path))
    loop(accelerator, model, optimizer, data)
    assert tiny.equal_bits(wanted, tiny.weights(model))
    assert same_states(states, state_bits(optimizer))


def test_settings_of_create_optimizer(tiny, tmp_path):
    model = tiny.model()
    args = tiny.args(
        tmp_path, optim="cpu_adam8bit", optim_args="threads=1", weight_decay=0.2, adam_beta2=0.9, adam_epsilon=1e-7
    )
    optimizer = create_optimizer(model, args)
    decayed, rest = optimizer.param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.2, 0.0)
    assert {id(p) for p in rest["params"]} == {id(p) for name, p in model.named_parameters() if "norm" in name}
    assert (decayed["lr"], decayed["betas"], decayed["eps"], decayed["state_bits"]) == (1e-3, (0.9, 0.9), 1e-7, 8)
    assert (optimizer.threads, optimizer.check_finite, optimizer.max_skipped_steps) == (1, True, 10)
    assert create_optimizer(model, args, lr=5.0).param_groups[0]["lr"] == 5.0
    assert create_optimizer(model, tiny.args(tmp_path)).param_groups[0]["state_bits"] == 4
    assert create_optimizer(model, LowMemConfig(), eps=1e-5).param_groups[1]["eps"] == 1e-5


def test_what_create_optimizer_refuses(tiny, tmp_path):
    model = tiny.model()
    with pytest.raises(TypeError, match="no argument momentum: it takes lr, betas, eps and weight_decay"):
        create_optimizer(model, LowMemConfig(), momentum=0.9)
    with pytest.raises(TypeError, match="takes TrainingArguments or a LowMemConfig, not dict"):
        create_optimizer(model, {"state_bits": 4})
    with pytest.raises(ValueError, match=re.escape('write optim="cpu_adam4bit" or leave optim out')):
        create_optimizer(model, tiny.args(tmp_path, optim="adafactor"))
    with pytest.raises(ValueError, match="has no trainable parameter"):
        create_optimizer(model.requires_grad_(False), LowMemConfig())


def test_a_gradient_scaler_of_ones_own(tiny):
    """Overflow in fp16: the scaler skips the step, the optimizer never sees it, the next one goes on."""
    model = tiny.model()
    optimizer = create_optimizer(model, LowMemConfig(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    batch = {key: value[None] for key, value in tiny.data(1)[0].items()}
    scales = []
    for step in range(3):
        before = tiny.weights(model)
        scaler.scale(model(**batch).loss).backward()
        if step == 1:
            model.lm_head.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        assert tiny.equal_bits(before, tiny.weights(model)) == (step == 1)
    assert scales == [2.0**8, 2.0**7, 2.0**7]
    assert optimizer.skipped_steps == 0
    assert {state["step"] for state in optimizer.state.values()} == {2}


def test_an_optimizer_of_torch(tiny):
    """Schedulers and Accelerate ask whether it is one."""
    optimizer = create_optimizer(tiny.model(), LowMemConfig())
    assert isinstance(optimizer, LowBitAdamW)
    assert isinstance(optimizer, torch.optim.Optimizer)


# -- scripts ----------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
sys.path.insert(1, {tests!r})
import transformers
from conftest import make_data, make_model

if __name__ == "__main__":
    (args,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses()
    trainer = transformers.Trainer(model=make_model(), args=args, train_dataset=make_data())
    trainer.train()
    print("optimizer", type(trainer.optimizer.optimizer).__name__, trainer.optimizer.optimizer.threads)
    print("argv0", sys.argv[0], "path0", sys.path[0], "name", __name__)
"""


def test_an_unchanged_script_under_the_launcher(tiny, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(tiny.root / "tests")))
    flags = "--use_cpu --report_to none --disable_tqdm true --save_strategy no --max_steps 2 --optim cpu_adam4bit"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "hf_lowmem.run"]
    command += [str(script), "--output_dir", str(tmp_path / "out"), "--optim_args", "threads=1", *flags.split()]
    path = os.pathsep.join(filter(None, [str(tiny.root), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "optimizer LowBitAdamW 1" in done.stdout
    assert f"argv0 {script} path0 {tmp_path} name __main__" in done.stdout


def test_run(tmp_path, monkeypatch, capsys):
    from hf_lowmem import run

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_script.py").write_text("import sys, a_neighbour\nprint(__name__, sys.argv, a_neighbour.x)\n")
    (tmp_path / "a_neighbour.py").write_text("x = 5\n")
    run.main(["a_script.py", "-m", "1"])
    assert capsys.readouterr().out == "__main__ ['a_script.py', '-m', '1'] 5\n"
    run.main(["-m", "a_script", "--flag"])
    assert capsys.readouterr().out == f"__main__ ['{tmp_path / 'a_script.py'}', '--flag'] 5\n"
    (tmp_path / "a_folder" / "inner").mkdir(parents=True)
    for argv, message in (
        (["no.py"], "no file 'no.py'"),
        (["a_folder"], "'a_folder' is a folder"),
        (["-m", "no_module"], "no module 'no_module'"),
        (["-m", "a_folder.no"], "no module 'a_folder.no'"),
        (["-m", "math.no"], "no module 'math.no'"),
        (["-m", "a_folder.inner"], "no module 'a_folder.inner'"),
        (["-m", ".a_script"], "no module '.a_script'"),
        ([], "usage: "),
        (["-m"], "usage: "),
    ):
        with pytest.raises(SystemExit) as caught:
            run.main(argv)
        shown = capsys.readouterr()
        assert caught.value.code == 2
        assert message in shown.err
        assert len(shown.err.splitlines()) == 1
        assert shown.out == ""
    with pytest.raises(SystemExit) as caught:
        run.main(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
    (tmp_path / "a_folder" / "__main__.py").write_text("print(__name__)\n")
    run.main(["-m", "a_folder"])
    run.main(["a_folder"])
    assert capsys.readouterr().out == "__main__\n" * 2
    (tmp_path / "in_want.py").write_text("import what_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="what_is_missing"):
        run.main(["-m", "in_want"])
