"""``python -m hf_lowmem.run train.py ...``: runs a script that does not import us, with the optim names known.

Under Accelerate's launcher: ``accelerate launch -m hf_lowmem.run train.py --optim cpu_adam4bit``. Like ``python``, it
takes ``-m package.module`` in the place of a script.
"""

from __future__ import annotations

import os
import runpy
import sys

from .registration import register

USAGE = "usage: python -m hf_lowmem.run (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(argv: list[str]) -> None:
    """Runs ``argv[0]`` as ``__main__`` with ``sys.argv = argv``.

    Raises:
        SystemExit: no script was given, or there is no such file.
    """
    module = argv[:1] == ["-m"]
    argv = argv[1:] if module else argv
    if not argv or argv[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    if not module and not os.path.exists(argv[0]):
        raise SystemExit(f"hf_lowmem.run: there is no file {argv[0]!r}\n{USAGE}")
    register()
    sys.argv = argv
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))  # as `python SCRIPT` has it
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
