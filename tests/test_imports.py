"""The house: which module may import which, and how long a file may be."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_lowmem

PACKAGE = Path(hf_lowmem.__file__).parent
HEAVY = {"transformers", "accelerate", "peft", "trl", "safetensors", "huggingface_hub", "datasets"}
LONGEST = 500  # lines: what is read at one sitting

# Each module and the modules of ours that it may import, at any depth of its code. Imports run one way only.
MAY_IMPORT = {
    "__init__": {
        "attachment",
        "export",
        "factory",
        "registration",
        "config",
        "loading",
        "lowbit",
        "optim",
        "plan",
        "trainer",
    },
    "config": set(),
    "codec": set(),
    "memory": set(),
    "drive_file": set(),
    "windows_files": {"drive_file"},
    "files": {"drive_file", "windows_files"},
    "buffers": {"drive_file", "memory"},
    "manifest": {"drive_file"},
    "folders": {"drive_file", "manifest", "plan"},
    "drive": {"drive_file"},
    "keeper": {"buffers", "drive", "drive_file", "folders", "manifest", "ticket"},
    "ticket": {"manifest", "drive_file"},
    "store": {"buffers", "drive", "drive_file", "files", "folders", "keeper", "manifest", "ticket"},
    "activations": {"checkpointing", "memory"},
    "checkpointing": set(),
    "split": {"checkpointing"},
    "kernels.__init__": set(),
    "kernels.adam": {"codec"},
    "kernels.native": {"codec", "kernels.adam"},
    "kernels.native_weights": {"kernels.adam", "kernels.native", "kernels.weights"},
    "kernels.triton_adam": {"codec", "kernels.adam", "kernels.triton_kernel"},
    "kernels.triton_kernel": set(),
    "kernels.int8": {"codec"},
    "kernels.weights": {"codec", "kernels.int8"},
    "kernels.int4": {"kernels.int8"},
    "kernels.nvrtc": set(),
    "kernels.cuda_int4": {"kernels.__init__", "kernels.int4", "kernels.nvrtc"},
    "kernels.triton_int8": {"kernels.int8", "kernels.triton_rows"},
    "kernels.triton_rows": {"kernels.int8", "kernels.triton_kernel"},
    "kernels.triton_weights": {"kernels.int8", "kernels.triton_kernel", "kernels.triton_rows", "kernels.weights"},
    "integers": {
        "engines",
        "codec",
        "kernels.__init__",
        "kernels.cuda_int4",
        "kernels.int4",
        "kernels.int8",
        "kernels.triton_int8",
    },
    "experts": {"codec", "integers"},
    "lowbit": {"config", "experts", "integers", "kernels.__init__", "kernels.int8"},
    "state": {"codec"},
    "late": set(),
    "head": set(),
    "scaler": set(),
    "again": set(),
    "loss": {"head"},
    "deferred": {"drive_states", "kernels.adam", "late", "layer", "link", "memory", "state"},
    "home": {"codec", "memory", "staging", "state"},
    "resident": {"home", "kernels.adam", "kernels.native", "kernels.triton_adam", "kernels.weights", "layer", "state"},
    "rules": set(),
    "staging": {"codec", "kernels.adam", "kernels.native", "memory"},
    "host": {"home", "kernels.__init__", "kernels.adam", "kernels.native", "staging", "state"},
    "code_updates": {
        "codec",
        "coding",
        "kernels.__init__",
        "kernels.adam",
        "kernels.native",
        "kernels.native_weights",
        "kernels.weights",
        "resident",
    },
    "adam_states": {"code_updates", "deferred", "drive_states", "host", "resident", "rules", "state"},
    "drive_states": {"layer", "state"},
    "optim": {
        "adam_states",
        "code_updates",
        "deferred",
        "host",
        "kernels.__init__",
        "kernels.adam",
        "kernels.native",
        "rules",
        "staging",
        "state",
    },
    "layer": set(),
    "shelf": {"layer", "memory"},
    "link": set(),
    "block": {"kernels.weights", "layer"},
    "engines": set(),
    "coding": {"engines", "kernels.__init__", "kernels.native_weights", "kernels.triton_weights", "kernels.weights"},
    "place": {"block", "layer", "link", "shelf"},
    "coded": {"block", "coding", "kernels.weights", "link", "place", "shelf"},
    "stream": {"block", "coded", "link", "place", "shelf"},
    "attachment": {
        "block",
        "checkpointing",
        "config",
        "kernels.weights",
        "layer",
        "link",
        "loss",
        "lowbit",
        "memory",
        "plan",
        "scaler",
        "shelf",
        "stream",
        "sums",
    },
    "sums": {"codec", "layer"},
    "loading": {"attachment", "block", "coded", "config", "layer", "memory", "shelf", "stream"},
    "export": {"attachment", "coding", "config", "kernels.weights"},
    "plan": {"codec", "layer"},
    "placement": {"block", "code_updates", "memory", "optim", "plan", "stream"},
    "overlap": {"buffers", "optim", "plan", "resident", "store", "stream"},
    "checks": {"config", "layer", "overlap", "sums"},
    "registration": {"checks", "config", "factory", "trainer"},
    "factory": {"attachment", "checks", "config", "lowbit", "optim"},
    "trainer": {
        "activations",
        "again",
        "attachment",
        "checkpointing",
        "checks",
        "config",
        "factory",
        "folders",
        "loss",
        "lowbit",
        "memory",
        "optim",
        "overlap",
        "placement",
        "plan",
        "split",
        "stream",
        "sums",
    },
    "run": {"registration"},
    "doctor": {"kernels.native"},
    "demo_data": set(),
    "demo": {"demo_data", "__init__"},
    "cli": {"doctor", "demo"},
    "__main__": {"cli"},
}
# The doors: the only modules that know the libraries of Hugging Face.
DOORS = {
    "attachment",
    "export",
    "integers",
    "lowbit",
    "checks",
    "factory",
    "overlap",
    "loss",
    "loading",
    "registration",
    "trainer",
    "run",
    "doctor",
    "demo_data",
    "demo",
    "cli",
    "__main__",
}
WITHOUT_TORCH = {"__init__", "config", "registration", "run", "cli", "__main__", "demo_data"}


def modules() -> dict[str, Path]:
    return {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}


def imported(name: str, path: Path) -> set[str]:
    """Absolute names of all that a module imports, inside functions too, but not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    only_for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = ["hf_lowmem", *name.split(".")[:-1]]
    found = set()
    for node in ast.walk(tree):
        if id(node) in only_for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *filter(None, [node.module])])
            found |= {target} | {f"{target}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    """The modules of ours among imported names."""
    known = modules()
    result = set()
    for name in names:
        if name == "hf_lowmem":
            continue  # `from . import x` is `hf_lowmem.x` as well
        inner = name.removeprefix("hf_lowmem.")
        if name.startswith("hf_lowmem.") and inner in known:
            result.add(inner)
    return result


def test_every_module_has_its_place() -> None:
    assert set(modules()) == set(MAY_IMPORT), "give a new module its place in MAY_IMPORT"


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_imports_run_one_way(name: str) -> None:
    assert own(imported(name, modules()[name])) <= MAY_IMPORT[name]


def test_the_allowed_directions_have_no_cycle() -> None:
    # registration asks trainer only inside functions, when a Trainer is made.
    pending = {name: set(allowed) for name, allowed in MAY_IMPORT.items()}
    while free := {name for name, allowed in pending.items() if not allowed}:
        pending = {name: allowed - free for name, allowed in pending.items() if name not in free}
    assert not pending


@pytest.mark.parametrize("name", sorted(set(MAY_IMPORT) - DOORS - {"__init__"}))
def test_only_the_doors_know_hugging_face(name: str) -> None:
    roots = {module.split(".")[0] for module in imported(name, modules()[name])}
    assert not roots & HEAVY


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_no_torch_at_import(name: str) -> None:
    """At the top level only: functions may import what they like."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = set()
    for node in top:
        roots |= {a.name.split(".")[0] for a in node.names} if isinstance(node, ast.Import) else set()
        roots |= {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) and not node.level else set()
    assert not roots & (HEAVY | {"torch"})


def test_importing_the_package_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = "import sys, hf_lowmem; print(sorted({'torch', 'transformers', 'accelerate'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_file_is_too_long() -> None:
    root = Path(__file__).parent.parent
    folders = ("hf_lowmem", "tests", "examples", "benchmarks", ".ci")
    files = [
        p
        for folder in folders
        for p in (root / folder).rglob("*")
        if p.suffix in (".py", ".cpp", ".cu", ".h", ".sh", "")
    ]
    lengths = {str(p.relative_to(root)): len(p.read_text(encoding="utf-8").splitlines()) for p in files if p.is_file()}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}
