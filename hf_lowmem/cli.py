"""``hf-lowmem``: the command line. Each command's module is imported when it is used, so that --help costs nothing."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

PROGRAM = "hf-lowmem"
BAD_INPUT = 2  # argparse's own code for a wrong command line
INTERRUPTED = 130  # a shell's code for what Ctrl-C ended
MOST_THREADS = 1024  # more are a slip of the finger, and cost memory each


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 for input that cannot be used, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    run = {"doctor": _doctor, "demo": _demo}[options.command]
    try:
        return run(options)
    except KeyboardInterrupt:
        pass  # said below, where the progress bars of the frames that were left are gone
    print(f"{PROGRAM} {options.command}: interrupted", file=sys.stderr)
    return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Full fine-tuning of language models in little memory.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine and this installation offer, and what to improve")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")

    demo = commands.add_parser("demo", help="fine-tune a real model on real text and compare the loss")
    demo.add_argument("--model", help="a model's folder, a .gguf file or a hub name; default: SmolLM2-135M-Instruct")
    demo.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 text files; default: the help texts of Python")
    demo.add_argument("--steps", type=_whole(1), default=32, help="optimizer steps; default: %(default)s")
    demo.add_argument(
        "--minutes", type=_minutes, default=5, help="training ends then, whatever the steps; default: %(default)s"
    )
    demo.add_argument("--batch", type=_whole(1), default=4, help="examples a step; default: %(default)s")
    demo.add_argument("--seq", type=_whole(1), default=256, help="tokens an example; default: %(default)s")
    demo.add_argument("--lr", type=_rate, default=1e-4, help="peak learning rate; default: %(default)s")
    demo.add_argument(
        "--optim",
        default="cpu_adam4bit",
        choices=("cpu_adam4bit", "cpu_adam8bit", "cpu_adam32bit"),
        help="the optimizer, by the bits of its states; default: %(default)s",
    )
    demo.add_argument(
        "--output",
        default="hf_lowmem_demo",
        metavar="FOLDER",
        help="where the result is saved: a new or empty folder, or an earlier demo's; default: %(default)s",
    )
    demo.add_argument(
        "--threads", type=_whole(1, MOST_THREADS), help="of the optimizer; default: physical cores less one"
    )
    demo.add_argument(
        "--seed",
        type=_whole(0, 2**32 - 1),  # numpy's range, which transformers' set_seed seeds too
        default=42,
        help="of the order of examples and of stochastic rounding; default: %(default)s",
    )
    return parser


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for argparse: whole numbers from ``low`` to ``high``."""
    span = f"of {low} or more" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {span}")
        return value

    return parse


def _rate(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number of 0 or more")
    return value


def _minutes(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _number(text: str) -> float:
    """NaN, which every range refuses, where the text is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


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
