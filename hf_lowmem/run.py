"""``python -m hf_lowmem.run train.py ...``: runs a script that does not import us, with the optim names known.

Under Accelerate's launcher: ``accelerate launch -m hf_lowmem.run train.py --optim cpu_adam4bit``. Like ``python``, it
takes ``-m package.module`` in the place of a script.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from typing import NoReturn

from .registration import register

USAGE = "usage: python -m hf_lowmem.run (SCRIPT | -m MODULE) [ARGUMENT ...]"
BAD_INPUT = 2  # what python itself ends with where there is no such file


def main(argv: list[str]) -> None:
    """Runs ``argv[0]`` as ``__main__`` with ``sys.argv = argv``.

    Raises:
        SystemExit: 0 for ``--help``; 2, and one line on stderr, where no script was given or there is none such.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        raise SystemExit(0)
    module = argv[:1] == ["-m"]
    argv = argv[1:] if module else argv
    if not argv:
        _refuse(USAGE)
    name = argv[0]
    if not module and not os.path.exists(name):
        _refuse(f"hf_lowmem.run: there is no file {name!r}")
    if not module and os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
        _refuse(f"hf_lowmem.run: {name!r} is a folder without a __main__.py: name the script in it")
    register()
    sys.argv = argv
    if module:
        sys.path[0] = os.getcwd()
        if not _can_run(name):
            _refuse(f"hf_lowmem.run: there is no module {name!r} to run here or among the installed ones")
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(name))  # as `python SCRIPT` has it
        runpy.run_path(name, run_name="__main__")


def _can_run(module: str) -> bool:
    """Whether there is such a module, or a package with a ``__main__``. Errors of the packages above it get out."""
    if not all(module.split(".")):
        return False
    try:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{module}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return False
    return spec is not None


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(BAD_INPUT)


if __name__ == "__main__":
    main(sys.argv[1:])
