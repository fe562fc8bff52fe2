"""``hf-lowmem doctor``: what this machine and this installation offer, and what to do about what is missing."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "hf_lowmem",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "peft",
    "trl",
    "bitsandbytes",
    "liger-kernel",
)
GIB = 2**30


def report() -> dict[str, Any]:
    """All as plain values: ``system``, ``packages``, ``core``, ``gpus``, and ``advice`` (empty if all is well)."""
    core = _core()
    found = {
        "system": _system(),
        "packages": {name: _version(name) for name in PACKAGES},
        "core": core,
        "gpus": _gpus(),
    }
    return {**found, "advice": _advice(core)}


def as_json() -> str:
    return json.dumps(report(), indent=2)


def as_table() -> str:
    """The report as aligned lines under headings."""
    found = report()
    system, core = found["system"], found["core"]
    omp = core["omp_num_threads"]
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "machine",
            [
                ("system", system["os"]),
                ("python", system["python"]),
                ("RAM", f"{system['ram_gib']:.1f} GiB, {system['ram_available_gib']:.1f} GiB available"),
                ("cores", f"{system['physical_cores']} physical, {system['logical_cores']} logical"),
                *((f"GPU {i}", _gpu_line(gpu)) for i, gpu in enumerate(found["gpus"])),
            ]
            + ([] if found["gpus"] else [("GPU", "none that torch can use")]),
        ),
        (
            "optimizer core",
            [
                ("engine", _engine(core)),
                ("threads", str(core["threads"])),
                ("OMP_NUM_THREADS", f"{omp or 'not set'} (ignored by the core)"),
                ("HF_LOWMEM_ISA", core["forced_isa"] or "not set"),
            ],
        ),
        ("packages", [(name, number or "not installed") for name, number in found["packages"].items()]),
    ]
    width = max(len(label) for _, rows in sections for label, _ in rows)
    lines = []
    for title, rows in sections:
        lines += [title, *(f"  {label:<{width}}  {value}" for label, value in rows), ""]
    lines += [f"! {line}" for line in found["advice"]] or ["all well"]
    return "\n".join(lines)


def _system() -> dict[str, Any]:
    import psutil

    from .kernels import native

    memory = psutil.virtual_memory()
    return {
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "ram_gib": memory.total / GIB,
        "ram_available_gib": memory.available / GIB,
        "physical_cores": native.physical_cores(),
        "logical_cores": os.cpu_count(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _core() -> dict[str, Any]:
    """What ``kernels.native`` found. The doctor must speak where the core is broken: its errors are findings."""
    from .kernels import native

    core: dict[str, Any] = {
        "native": False,
        "isa": None,
        "isas": [],
        "error": None,
        "isa_error": None,
        "threads": native.default_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "forced_isa": os.environ.get("HF_LOWMEM_ISA"),
    }
    try:
        core["native"] = native.available()
        core["isas"] = list(native.isas()) if core["native"] else [native.TORCH]
        if (core["forced_isa"] or core["isas"][0]).lower() in core["isas"]:
            core["isa"] = native.isa() if core["native"] else native.TORCH
        else:
            core["isa_error"] = (
                f"HF_LOWMEM_ISA={core['forced_isa']} is not an instruction set that works here, so every optimizer "
                f"step will be refused. Unset it, which takes the best one, or set it to {' or '.join(core['isas'])}"
            )
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        core["error"] = str(error)
    return core


def _engine(core: dict[str, Any]) -> str:
    here = f"(here: {', '.join(core['isas'])})"
    if core["isa_error"]:
        return f"none, for HF_LOWMEM_ISA is wrong {here}"
    if not core["native"]:
        return "plain torch (slow)"
    if core["isa"] == "torch":
        return f"plain torch (slow), which HF_LOWMEM_ISA asks for {here}"
    return f"native, {core['isa']} {here}"


def _gpus() -> list[dict[str, Any]]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": properties.total_memory / GIB,
            }
        )
    return gpus


def _gpu_line(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['memory_gib']:.1f} GiB"


def _advice(core: dict[str, Any]) -> list[str]:
    advice = []
    if core["isa_error"]:
        advice.append(core["isa_error"])
    if core["error"]:
        advice.append(f"the native core refuses to run: {core['error']}")
    elif not core["native"]:
        advice.append(
            "no native core: the optimizer runs in plain torch, many times slower. Install a wheel for this platform, "
            "or a C++ compiler (Linux: apt install g++, macOS: xcode-select --install, Windows: Visual Studio Build "
            "Tools) and then again: pip install --force-reinstall --no-deps --no-cache-dir hf_lowmem"
        )
    return advice
