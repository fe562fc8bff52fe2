"""``hf-lowmem``: the command line. Each command's module is imported when it is used, so that --help costs nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

PROGRAM = "hf-lowmem"
BAD_INPUT = 2  # argparse's own code for a wrong command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 2 for input that cannot be used."""
    options = _parser().parse_args(arguments)
    run = {"doctor": _doctor, "demo": _demo}[options.command]
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Full fine-tuning of language models in little memory.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine and this installation offer, and what to improve")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")

    demo = commands.add_parser(
        "demo",
        help="fine-tune a real model on real text, in minutes",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--model", help="a model's folder, a .gguf file or a hub name; default: SmolLM2-135M-Instruct")
    demo.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 text files; default: the help texts of Python")
    demo.add_argument("--steps", type=_positive, default=32, help="optimizer steps")
    demo.add_argument("--minutes", type=float, default=5, help="training ends then, whatever the steps")
    demo.add_argument("--batch", type=_positive, default=4, help="examples a step")
    demo.add_argument("--seq", type=_positive, default=256, help="tokens an example")
    demo.add_argument("--lr", type=float, default=1e-4, help="peak learning rate")
    demo.add_argument("--optim", default="cpu_adam4bit", choices=("cpu_adam4bit", "cpu_adam8bit", "cpu_adam32bit"))
    demo.add_argument("--output", default="hf_lowmem_demo", metavar="FOLDER", help="where the result is saved")
    demo.add_argument("--threads", type=_positive, help="of the optimizer; default: physical cores less one")
    demo.add_argument("--seed", type=int, default=42, help="of the order of examples and of stochastic rounding")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hf_lowmem")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "(not installed)"


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    print(doctor.as_json() if options.json else doctor.as_table())
    return 0


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    try:
        demo.run(options)
    except demo.BadInput as error:
        print(f"{PROGRAM} demo: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
