"""Builds the C++ core into ``hf_lowmem/kernels/``; everything else about the package is in pyproject.toml.

The core is a plain shared library that Python calls through ctypes: it needs a C++17 compiler and nothing else, neither
Python's headers nor torch. Without a compiler the package is installed all the same and runs on torch, slowly.

Environment:
    CXX: the compiler (and its first arguments); otherwise c++, g++, clang++ and cl are tried.
    HF_LOWMEM_REQUIRE_NATIVE: 1 makes a core that cannot be built an error.
    ARCHFLAGS: macOS's ``-arch`` options, handed to the compiler.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "hf_lowmem" / "csrc"
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
LIBRARY = Path("hf_lowmem") / "kernels" / f"_core{SUFFIX}"

# Fused multiply-adds only where they are written: the bits are the same on every machine. That nobody reads errno or
# the floating-point exceptions changes no bits and lets loops be vectorised.
GNU_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
GNU_FLAGS += ["-fno-trapping-math", "-fno-exceptions", "-fno-rtti"]
LINK_FLAGS = {"linux": ["-Wl,--as-needed", "-Wl,-s"], "win32": ["-static"]}  # the core needs the C library alone
MSVC_FLAGS = ["/nologo", "/O2", "/std:c++17", "/fp:precise", "/GS-", "/MT"]
AVX2 = {"gnu": ["-mavx2", "-mfma"], "msvc": ["/arch:AVX2"]}
AVX512 = {"gnu": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"], "msvc": ["/arch:AVX512"]}
PLAIN: dict[str, list[str]] = {"gnu": [], "msvc": []}


class BuildFailed(Exception):
    """The core could not be built; the message is for the person at the keyboard."""


def sources(machine: str) -> dict[str, dict[str, list[str]]]:
    """The files of the core on a kind of machine, each with the flags of its instruction set."""
    files = {"dispatch.cpp": PLAIN, "isa_base.cpp": PLAIN}
    if machine in ("x86_64", "amd64"):
        files |= {"isa_avx2.cpp": AVX2, "isa_avx512.cpp": AVX512}
    elif machine in ("aarch64", "arm64"):
        files |= {"isa_neon.cpp": PLAIN}
    return files


def target_machine() -> str:
    """What the core is built for: this machine, or the one architecture that ARCHFLAGS names."""
    arch = shlex.split(os.environ.get("ARCHFLAGS", ""))
    return (arch[arch.index("-arch") + 1] if arch.count("-arch") == 1 else platform.machine()).lower()


def find_compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"], posix=os.name != "nt")
    names = ("cl", "clang-cl", "g++", "clang++") if os.name == "nt" else ("c++", "g++", "clang++")
    for name in names:
        if shutil.which(name):
            return [name]
    raise BuildFailed(f"no C++ compiler found (tried {', '.join(names)}; $CXX names one)")


def run(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise BuildFailed(f"{command[0]} does not run: {error}") from error
    if result.returncode != 0:
        raise BuildFailed(f"the compiler failed:\n{' '.join(command)}\n{result.stdout}{result.stderr}")


def build_core(out: Path) -> None:
    """Compiles every file with its own flags and links the library ``out``."""
    compiler = find_compiler()
    msvc = Path(compiler[0]).stem.lower() in ("cl", "clang-cl")
    kind = "msvc" if msvc else "gnu"
    arch = shlex.split(os.environ.get("ARCHFLAGS", "")) if sys.platform == "darwin" else []
    flags = MSVC_FLAGS if msvc else [*GNU_FLAGS, *arch]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for name, isa in sources(target_machine()).items():
            source, target = str(SOURCES / name), str(Path(folder) / name.replace(".cpp", ".obj" if msvc else ".o"))
            objects.append(target)
            place = ["/c", source, f"/Fo{target}"] if msvc else ["-c", source, "-o", target]
            run([*compiler, *flags, *isa[kind], *place])
        made = str(Path(folder) / out.name)  # moved when whole: a library that is loaded must not be written into
        if msvc:
            run([*compiler, "/nologo", "/LD", *objects, f"/Fe{made}"])
        else:
            link = LINK_FLAGS.get(sys.platform, [])
            run([*compiler, "-shared", *arch, *link, *objects, "-o", made])
        staged = out.with_name(out.name + ".new")
        shutil.copy2(made, staged)
        os.replace(staged, out)


def build_core_if_possible(out: Path) -> bool:
    try:
        build_core(out)
    except BuildFailed as error:
        out.unlink(missing_ok=True)  # an old one would be run with a new native.py
        if os.environ.get("HF_LOWMEM_REQUIRE_NATIVE") == "1":
            raise SystemExit(f"hf_lowmem: {error}") from error
        print(
            f"\nhf_lowmem: {error}\nhf_lowmem: going on WITHOUT the compiled core. Optimizer steps will run on plain "
            f"torch, many times slower. Install a C++17 compiler and reinstall to have it.\n",
            file=sys.stderr,
        )
        return False
    return True


class Package(Distribution):
    """A distribution that is platform-specific once the core has been built."""

    has_core = False

    def has_ext_modules(self) -> bool:
        return self.has_core


class BuildWithCore(build_py):
    """Puts the core beside native.py: in the build folder, or for an editable install in the source tree."""

    def run(self) -> None:
        # Neither the sources nor what an editable install left behind belongs into a wheel.
        self.exclude_package_data.setdefault("hf_lowmem", []).append("csrc/*")
        self.exclude_package_data.setdefault("hf_lowmem.kernels", []).append("_core.*")
        super().run()
        base = ROOT if self.editable_mode else Path(self.build_lib)
        self.distribution.has_core = build_core_if_possible(base / LIBRARY)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return [*outputs, str(Path(self.build_lib) / LIBRARY)] if self.distribution.has_core else outputs


class PlatformWheel(bdist_wheel):
    """One wheel for every Python of a platform; for every platform where there is no core in it."""

    def run(self) -> None:
        self.run_command("build_py")  # whether there is a core decides the tag
        self.root_is_pure = not self.distribution.has_core
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "any" if self.root_is_pure else super().get_tag()[2]


setup(distclass=Package, cmdclass={"build_py": BuildWithCore, "bdist_wheel": PlatformWheel})
