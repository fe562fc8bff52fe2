"""LowMemConfig: where settings may come from, and what is refused with which message."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest

from hf_lowmem import LowMemConfig, __version__
from hf_lowmem.config import OPTIM_BITS, merge, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 gb", 1_500_000_000),
        ("64KiB", 65536),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("7", 7),
        (7, 7),
        ("10B", 10),
    ],
)
def test_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "24 apples", "0", 0, True, None, "1GB2"])
def test_bytes_that_are_none(text):
    with pytest.raises(ValueError, match=r"cpu_memory=.*write"):
        parse_bytes(text, "cpu_memory")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("state_bits", 3, "state_bits=3 is not a width that exists: write state_bits=4, 8 or 32"),
        ("state_bits", "4", "state_bits='4' is not a width"),
        ("state_bits", True, "state_bits=True is not a width"),
        ("master_bits", 12, "master_bits=12 is not a width that exists: write master_bits=8, 16, 24 or 32"),
        ("weights", "int3", "weights='int3' is none that weights can cross the link in"),
        ("threads", 0, "threads=0 is not a whole number of 1 or more"),
        ("threads", 1.5, "threads=1.5 is not a whole number"),
        ("seed", -1, "seed=-1 is not a whole number from 0 to"),
        ("seed", 2**63, "is not a whole number from 0 to"),
        ("max_skipped_steps", 0, "max_skipped_steps=0 is not a whole number of 1 or more"),
        ("staging_memory", "much", "staging_memory='much' is not an amount of memory"),
        ("staging_memory", "0GB", "staging_memory='0GB' is no memory at all"),
    ],
)
def test_bad_values(field, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LowMemConfig(**{field: value})


def test_round_trip():
    config = LowMemConfig(state_bits=8, master_bits=16, threads=3, seed=7, staging_memory="1GiB", max_skipped_steps=2)
    assert config.staging_bytes == 2**30
    assert LowMemConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_key_of_a_dict():
    with pytest.raises(ValueError, match=r"'state_bit' is not a field .*\(did you mean state_bits\?\)"):
        LowMemConfig.from_dict({"state_bit": 4})


# -- optim_args -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "bits"), OPTIM_BITS.items())
def test_names(name, bits):
    assert LowMemConfig.from_optim_args(name) == LowMemConfig(state_bits=bits)
    assert LowMemConfig.from_optim_args(name, f"state_bits={bits}") == LowMemConfig(state_bits=bits)


def test_optim_args():
    wanted = LowMemConfig(state_bits=4, master_bits=16, threads=2, seed=5, staging_memory="1GiB", max_skipped_steps=3)
    text = "master_bits=16, threads = 2,seed=5,staging_memory=1GiB,max_skipped_steps=3,"
    assert LowMemConfig.from_optim_args("cpu_adam4bit", text) == wanted
    stock = dict(part.split("=") for part in text.replace(" ", "").strip(",").split(","))
    assert LowMemConfig.from_optim_args("cpu_adam4bit", stock) == wanted
    assert LowMemConfig.from_optim_args("cpu_adam4bit", "threads=none").threads is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adamw_torch", None, "optim='adamw_torch' is not a name of ours: write one of 'cpu_adam4bit', 'cpu_adam8bit'"),
        (
            "cpu_adam4bit",
            "state_bits=8",
            'optim="cpu_adam4bit" has 4-bit states, but optim_args says state_bits=8: write optim="cpu_adam8bit"',
        ),
        ("cpu_adam4bit", "state_bits=3", "but optim_args says state_bits=3: write one of 'cpu_adam4bit'"),
        (
            "cpu_adam4bit",
            "thread=2",
            "unknown key 'thread' (did you mean threads?): the keys are compute, cpu_memory, debug, gpu_memory",
        ),
        (
            "cpu_adam4bit",
            "zebra=2",
            "unknown key 'zebra': the keys are compute, cpu_memory, debug, gpu_memory, grad_weight, gradient_dtype, ",
        ),
        ("cpu_adam4bit", "seed", "'seed', which is not key=value"),
        ("cpu_adam4bit", "seed=", "'seed=', which is not key=value"),
        ("cpu_adam4bit", "seed=1,seed=2", "sets seed twice, to 1 and to 2"),
        ("cpu_adam4bit", "threads=two", "threads='two' is not a whole number"),
        ("cpu_adam4bit", "lr=1e-3", "lr, which is a flag of TrainingArguments: write learning_rate there"),
        ("cpu_adam4bit", "betas=0.9", "write adam_beta1 and adam_beta2 there"),
        ("cpu_adam4bit", "eps=1e-6", "write adam_epsilon there"),
        ("cpu_adam4bit", "weight_decay=0", "write weight_decay there"),
    ],
)
def test_bad_optim_args(name, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LowMemConfig.from_optim_args(name, text)


# -- lowmem= together with optim and optim_args -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("lowmem", "optim", "optim_args", "wanted"),
    [
        (None, None, None, LowMemConfig()),
        (None, "cpu_adam8bit", "seed=2", LowMemConfig(state_bits=8, seed=2)),
        ({"state_bits": 8}, None, None, LowMemConfig(state_bits=8)),
        (LowMemConfig(state_bits=32), None, "threads=2", LowMemConfig(state_bits=32, threads=2)),
        (LowMemConfig(seed=3), "cpu_adam8bit", "threads=2", LowMemConfig(state_bits=8, seed=3, threads=2)),
        (LowMemConfig(state_bits=8), "cpu_adam8bit", None, LowMemConfig(state_bits=8)),
        ({"seed": 3}, "cpu_adam4bit", "seed=3", LowMemConfig(seed=3)),
    ],
)
def test_merge(lowmem, optim, optim_args, wanted):
    assert merge(lowmem, optim, optim_args) == wanted


@pytest.mark.parametrize(
    ("lowmem", "optim", "optim_args", "message"),
    [
        (
            {"state_bits": 8},
            "cpu_adam4bit",
            None,
            'optim="cpu_adam4bit" has 4-bit states, but lowmem says state_bits=8: write optim="cpu_adam8bit"',
        ),
        (LowMemConfig(seed=3), None, "seed=4", "optim_args says seed=4, but lowmem says seed=3: write seed in one"),
        ({"state_bits": 3}, None, None, "state_bits=3 is not a width"),
        ({"bits": 3}, None, None, "'bits' is not a field of LowMemConfig"),
    ],
)
def test_contradictions(lowmem, optim, optim_args, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        merge(lowmem, optim, optim_args)


# -- HfArgumentParser -------------------------------------------------------------------------------------------
def test_command_line_yaml_and_json(tmp_path):
    parser = pytest.importorskip("transformers").HfArgumentParser
    wanted = LowMemConfig(state_bits=8, threads=2, staging_memory="1GB")
    argv = ["--state_bits", "8", "--threads", "2", "--staging_memory", "1GB"]
    assert parser(LowMemConfig).parse_args_into_dataclasses(argv) == (wanted,)
    (tmp_path / "a.json").write_text(json.dumps(wanted.to_dict()))
    assert parser(LowMemConfig).parse_json_file(str(tmp_path / "a.json")) == (wanted,)
    (tmp_path / "a.yaml").write_text("state_bits: 8\nthreads: 2\nstaging_memory: 1GB\n")
    assert parser(LowMemConfig).parse_yaml_file(str(tmp_path / "a.yaml")) == (wanted,)


def test_one_command_line_with_training_arguments(tmp_path):
    """Both have a seed: the option is TrainingArguments', and ours follows."""
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, LowMemConfig))
    argv = ["--output_dir", str(tmp_path), "--seed", "5", "--threads", "2"]
    args, config = parser.parse_args_into_dataclasses(argv)
    assert (args.seed, config.seed, config.threads) == (5, None, 2)
    args, config = parser.parse_dict({"output_dir": str(tmp_path), "seed": 5, "threads": 2})
    assert (args.seed, config.seed, config.threads) == (5, None, 2)


def test_replaced_keeps_the_seed():
    config = LowMemConfig(seed=7, threads=2)
    assert config.replaced(threads=3) == LowMemConfig(seed=7, threads=3)
    assert config != config.replaced(seed=8)
    assert "seed=7" in repr(config)


def test_version():
    import hf_lowmem

    text = (__import__("pathlib").Path(hf_lowmem.__file__).parent.parent / "pyproject.toml").read_text()
    assert f'version = "{__version__}"' in text


@pytest.mark.parametrize("name", ["gpu_memory", "cpu_memory"])
def test_budgets(name) -> None:
    config = LowMemConfig.from_optim_args("cpu_adam4bit", f"{name}=24GB")
    assert getattr(config, name.replace("memory", "bytes")) == 24 * 10**9
    assert getattr(LowMemConfig(), name.replace("memory", "bytes")) is None
    assert LowMemConfig.from_optim_args("cpu_adam4bit", f"{name}=none") == LowMemConfig()
    with pytest.raises(ValueError, match=f"{name}='much' is not an amount of memory"):
        LowMemConfig(**{name: "much"})


def test_offload_activations() -> None:
    for text, value in (("true", True), ("False", False), ("none", None)):
        config = LowMemConfig.from_optim_args("cpu_adam4bit", f"offload_activations={text}")
        assert config.offload_activations is value
    for bad in ("maybe", 1):
        with pytest.raises(ValueError, match=r"offload_activations=.* is neither true nor false"):
            LowMemConfig(offload_activations=bad)


def test_auto_starts_with_all_blocks() -> None:
    assert LowMemConfig(offload="auto").offload_share == 1
    assert LowMemConfig(offload="9/28").offload_share == Fraction(9, 28)
    with pytest.raises(ValueError, match=r'write "auto", "none"'):
        LowMemConfig(offload="1.5")


def test_one_value_written_in_two_ways_is_one() -> None:
    assert merge({"offload": 0.5}, "cpu_adam4bit", "offload=0.5").offload == "0.5"


@pytest.mark.parametrize("name", ["gpu_memory", "cpu_memory"])
def test_a_number_without_a_unit_is_bytes(name) -> None:
    with pytest.raises(ValueError, match=f'{name}=.24. is 24 bytes: write a unit, such as "24GB"'):
        LowMemConfig(**{name: "24"})
