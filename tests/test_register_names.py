"""The optim names in stock transformers. Needs no torch, so that it runs on every Python with transformers alone."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
NAMES = ("cpu_adam4bit", "cpu_adam8bit", "cpu_adam32bit")
ROOT = Path(__file__).resolve().parent.parent


def python(code: str, **env: str) -> str:
    code = f"import sys; sys.modules['torch'] = None  # transformers imports much faster without\n{code}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "PYTHONPATH": path, **env}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def names():
    import hf_lowmem

    hf_lowmem.register()
    from transformers.training_args import OptimizerNames

    return OptimizerNames


@pytest.mark.parametrize("value", NAMES)
def test_a_real_member(names, value):
    member = names(value)
    assert member is names[value.upper()] is getattr(names, value.upper()) is names(member)
    assert isinstance(member, names)
    assert isinstance(member, str)
    assert (member.name, member.value) == (value.upper(), value)
    assert [m for m in names if m == value] == [member]
    assert value.upper() in names.__members__
    assert member in names
    assert len({member, value}) == 1
    assert repr(member) == f"<OptimizerNames.{value.upper()}: '{value}'>"
    if sys.version_info >= (3, 12):
        assert value in names


def test_other_members_are_as_before(names):
    code = "from transformers.training_args import OptimizerNames as N; print([(m.name, m.value) for m in N])"
    before = eval(python(code, HF_LOWMEM_REGISTER="0"))
    after = [(m.name, m.value) for m in names]
    assert after == [*before, *((value.upper(), value) for value in NAMES)]
    with pytest.raises(ValueError, match="is not a valid OptimizerNames"):
        names("cpu_adam5bit")


def test_registering_again_changes_nothing(names):
    import hf_lowmem

    finders, members = list(sys.meta_path), list(names)
    hf_lowmem.register()
    assert (sys.meta_path, list(names)) == (finders, members)


@pytest.mark.parametrize("value", NAMES)
def test_copies_and_pickles(names, value):
    member = names(value)
    assert copy.deepcopy(member) is member
    assert copy.copy(member) == member
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(member, protocol))
        assert loaded == member
        assert type(loaded) is str
    assert pickle.loads(pickle.dumps(names.ADAFACTOR)) is names.ADAFACTOR


def test_command_line(names):
    import dataclasses

    from transformers import HfArgumentParser

    @dataclasses.dataclass
    class Flags:
        optim: names = names.ADAFACTOR

    Flags.__annotations__["optim"] = names
    parser = HfArgumentParser(Flags)
    for value in NAMES:
        assert value in parser.format_help()
        (flags,) = parser.parse_args_into_dataclasses(["--optim", value])
        assert flags.optim == value


def test_after_transformers_and_before():
    names = "from transformers.training_args import OptimizerNames; print(OptimizerNames('cpu_adam4bit').name)"
    assert python(f"import hf_lowmem\n{names}") == "CPU_ADAM4BIT"
    assert python(f"import transformers.training_args, hf_lowmem\n{names}") == "CPU_ADAM4BIT"


def test_opt_out():
    code = (
        "import sys, hf_lowmem; from transformers.training_args import OptimizerNames as N;"
        "print([m.value for m in N if m.value.startswith('cpu_')], [f for f in sys.meta_path if 'lowmem' in repr(f)]);"
        "hf_lowmem.register(); print(N('cpu_adam4bit'))"
    )
    assert python(code, HF_LOWMEM_REGISTER="0").splitlines()[0] == "[] []"


def test_import_is_light_and_the_hook_leaves_no_trace():
    code = (
        "import sys, hf_lowmem; print([m for m in ('transformers', 'numpy', 'accelerate') if m in sys.modules])\n"
        "import transformers.training_args as t; print(type(t.__loader__).__name__, vars(t.__loader__).keys())\n"
        "import inspect; print(len(inspect.getsource(t)) > 1000, t.__spec__.name)\n"
        "print(sorted(set(dir(hf_lowmem)) & {'LowMemConfig', 'LowMemTrainer', 'LowBitAdamW', 'register'}))"
    )
    light, loader, source, names = python(code).splitlines()
    assert light == "[]"
    assert loader == "SourceFileLoader dict_keys(['name', 'path'])"
    assert source == "True transformers.training_args"
    assert names == "['LowBitAdamW', 'LowMemConfig', 'LowMemTrainer', 'register']"


def test_unknown_name():
    import hf_lowmem

    with pytest.raises(AttributeError, match="no attribute 'LowMemTrainers'"):
        _ = hf_lowmem.LowMemTrainers


def test_it_adds_little_to_the_import_of_transformers():
    """Under 0.3 s; the best of three, since the machine may be busy."""
    code = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
    plain = "import transformers.training_args"
    ours = f"import hf_lowmem; {plain}"
    best = {text: min(float(python(code.format(text))) for _ in range(3)) for text in (plain, ours)}
    assert best[ours] - best[plain] < 0.3


def test_a_refusing_enum_warns_and_does_not_break_the_import():
    code = (
        "import warnings, sys\n"
        "import hf_lowmem.registration as r\n"
        "def refuse(*args): raise RuntimeError('no members today')\n"
        "r.add_enum_member = refuse\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import transformers.training_args\n"
        "print([str(w.message) for w in caught if w.category is RuntimeWarning])"
    )
    said = python(code)
    assert "could not register the optim names cpu_adam4bit, cpu_adam8bit, cpu_adam32bit" in said
    assert "no members today" in said
    assert "LowMemTrainer" in said
