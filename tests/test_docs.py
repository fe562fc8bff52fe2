"""What README and docs say is so: code compiles and its short pieces run, links resolve, commands are CI's."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_lowmem import LowMemConfig, cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}-{number}", block.group(2))
        for page in PAGES
        for number, block in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
        if block.group(1) == language
    ]


PYTHON = blocks("python")


def test_there_is_code_to_check() -> None:
    assert PYTHON
    assert blocks("bash")


@pytest.mark.parametrize("code", [code for _, code in PYTHON], ids=[name for name, _ in PYTHON])
def test_code_compiles_and_imports_what_exists(code: str) -> None:
    import hf_lowmem

    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "hf_lowmem":
            for alias in node.names:
                assert hasattr(hf_lowmem, alias.name)


@pytest.mark.parametrize(
    "code",
    [code for name, code in PYTHON if name.startswith(("README", "docs/optimizer"))],
    ids=[name for name, _ in PYTHON if name.startswith(("README", "docs/optimizer"))],
)
def test_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<docs>", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://", "#")):
            assert (page.parent / link.split("#")[0]).exists(), f"{page.name} links to {link}"


def test_ci_runs_the_readme_s_test_command() -> None:
    commands = [line for _, block in blocks("bash") for line in block.splitlines() if "pytest" in line]
    assert len(set(commands)) == 1
    ci = [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    assert commands[0] in ci


def test_the_readme_s_demo_command_exists() -> None:
    (command,) = {line for _, block in blocks("bash") for line in block.splitlines() if "hf-lowmem" in line}
    options = cli._parser().parse_args(command.split("hf-lowmem")[1].split())
    assert options.command == "demo"


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "optimizer.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(LowMemConfig):
        assert f"| `{field.name}` |" in text


def test_the_script_is_valid_bash() -> None:
    if sys.platform == "win32":
        pytest.skip("the CI script is for a POSIX shell")
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
