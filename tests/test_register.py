"""The optim names through TrainingArguments and the stock Trainer, with and without transformers' table of handlers."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_lowmem import LowBitAdamW
from hf_lowmem.config import OPTIM_BITS


@pytest.mark.parametrize("name", OPTIM_BITS)
def test_training_arguments(tiny, tmp_path, name):
    args = tiny.args(tmp_path, optim=name)
    assert args.optim == name
    assert args.to_dict()["optim"] == name
    assert json.loads(args.to_json_string())["optim"] == name
    for other in (copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args, seed=7)):
        assert other.optim == name
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True).set_optimizer(name).optim == name


def test_command_line_yaml_and_json(tmp_path):
    parser = HfArgumentParser(TrainingArguments)
    assert all(name in parser.format_help() for name in OPTIM_BITS)
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--optim", "cpu_adam8bit", "--optim_args", "threads=2,seed=1"]
    (args,) = parser.parse_args_into_dataclasses(flags)
    assert (args.optim, args.optim_args) == ("cpu_adam8bit", "threads=2,seed=1")
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "optim": "cpu_adam4bit", "optim_args": "threads=2"}
    (tmp_path / "a.json").write_text(json.dumps(settings))
    (tmp_path / "a.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    for read, file in ((parser.parse_json_file, "a.json"), (parser.parse_yaml_file, "a.yaml")):
        (args,) = read(str(tmp_path / file))
        assert (args.optim, args.optim_args) == ("cpu_adam4bit", "threads=2")


def test_training_args_bin_needs_us_neither_to_load_nor_to_save(tiny, tmp_path):
    mine = tiny.args(tmp_path, optim="cpu_adam4bit")
    torch.save(mine, tmp_path / "here.bin")
    code = (
        "import sys, torch\n"
        "args = torch.load(sys.argv[1] + '/here.bin', weights_only=False)\n"
        "print(type(args).__name__, repr(args.optim), args.learning_rate, args.to_dict()['optim'])\n"
        "torch.save(args, sys.argv[1] + '/there.bin')\n"
        "print([m for m in sys.modules if 'hf_lowmem' in m])\n"
    )
    said, modules = tiny.python(code, str(tmp_path)).stdout.splitlines()
    assert said == "TrainingArguments 'cpu_adam4bit' 0.001 cpu_adam4bit"
    assert modules == "[]"
    back = torch.load(tmp_path / "there.bin", weights_only=False)
    assert back.to_dict() == mine.to_dict()
    assert Trainer.get_optimizer_cls_and_kwargs(back, tiny.model())[0] is LowBitAdamW


@pytest.mark.parametrize(("name", "bits"), OPTIM_BITS.items())
def test_stock_trainer(tiny, tmp_path, name, bits):
    trainer = tiny.fit(
        Trainer, tmp_path, optim=name, optim_args="master_bits=16,seed=3,threads=1", weight_decay=0.1, adam_beta2=0.95
    )
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, LowBitAdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["state_bits"] for group in optimizer.param_groups] == [bits, bits]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2
    assert (optimizer.seed, optimizer.threads, optimizer.check_finite) == (3, 1, True)
    assert optimizer.max_skipped_steps == 10
    layer = trainer.model.model.layers[0]
    width = {p: state["bits"] for p, state in optimizer.state.items()}
    assert width[layer.mlp.up_proj.weight] == bits
    assert width[layer.self_attn.k_proj.weight] == 32  # 2,048 values
    assert width[layer.input_layernorm.weight] == 32
    assert width[trainer.model.model.embed_tokens.weight] == max(8, bits)
    assert width[trainer.model.lm_head.weight] == max(8, bits)


def test_bad_optim_args_before_any_weight_changes(tiny, tmp_path):
    for optim_args, message in (
        ("state_bits=8", 'write optim="cpu_adam8bit"'),
        ("master_bit=16", "did you mean master_bits"),
        ("lr=1e-3", "write learning_rate there"),
    ):
        model = tiny.model()
        before = tiny.weights(model)
        with pytest.raises(ValueError, match=message):
            tiny.fit(Trainer, tmp_path, model, optim="cpu_adam4bit", optim_args=optim_args)
        assert tiny.equal_bits(before, tiny.weights(model))


WITHOUT_TABLE = """
import sys
sys.path.insert(0, sys.argv[1])
import transformers.trainer, transformers.trainer_optimizer
del transformers.trainer_optimizer._OPTIMIZER_HANDLERS, transformers.trainer._OPTIMIZER_HANDLERS
import hf_lowmem
from conftest import fit, weights
trainer = fit(transformers.trainer.Trainer, sys.argv[2], optim="cpu_adam4bit", max_steps=2)
print(type(trainer.optimizer.optimizer).__name__, hasattr(trainer.get_optimizer_cls_and_kwargs, "__wrapped__"))
print({name: w.double().sum().item() for name, w in weights(trainer.model).items()})
"""


def test_without_the_private_table_the_public_method_is_wrapped(tiny, tmp_path):
    """As on a transformers that has no such table: the same optimizer, the same weights."""
    said = tiny.python(WITHOUT_TABLE, str(tiny.root / "tests"), str(tmp_path)).stdout.splitlines()
    assert said[-2] == "LowBitAdamW True"
    with_table = tiny.fit(Trainer, tmp_path, optim="cpu_adam4bit", max_steps=2)
    assert not hasattr(Trainer.get_optimizer_cls_and_kwargs, "__wrapped__")
    assert said[-1] == str({name: w.double().sum().item() for name, w in tiny.weights(with_table.model).items()})


def test_the_wrapped_method_leaves_other_names_to_stock_code(tiny, tmp_path):
    from hf_lowmem import registration

    class Other(Trainer):
        pass

    registration._wrap_class_and_kwargs(Other)
    registration._wrap_class_and_kwargs(Other)
    args = tiny.args(tmp_path, optim="adamw_torch")
    assert Other.get_optimizer_cls_and_kwargs(args) == Trainer.get_optimizer_cls_and_kwargs(args)
    ours = tiny.args(tmp_path, optim="cpu_adam8bit")
    assert Other.get_optimizer_cls_and_kwargs(ours)[1]["state_bits"] == 8
    assert not hasattr(Trainer.get_optimizer_cls_and_kwargs, registration._MARK)


def test_other_optimizers_train_as_before(tiny, tmp_path):
    """The wrapped train() looks at nothing and adds nothing for them."""
    trainer = tiny.fit(
        Trainer, tmp_path, optim="adamw_torch", save_strategy="steps", save_steps=2, save_only_model=True
    )
    assert "SkippedStepsCallback" not in trainer.callback_handler.callback_list
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
    tiny.fit(Trainer, tmp_path, optim="adamw_torch", resume=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("give", ["optimizers", "optimizer_cls_and_kwargs"])
def test_our_optimizer_handed_to_the_stock_trainer(tiny, tmp_path, give):
    model = tiny.model()
    if give == "optimizers":
        given = {give: (LowBitAdamW(model.parameters(), check_finite=True), None)}
    else:
        given = {give: (LowBitAdamW, {"lr": 1e-3})}
    trainer = tiny.fit(Trainer, tmp_path, model, trainer=given)
    assert "SkippedStepsCallback" in trainer.callback_handler.callback_list
