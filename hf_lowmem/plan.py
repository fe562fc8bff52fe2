"""``Plan``: what of a model rests where, and how much memory that takes. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from . import codec
from .layer import gradient_dtype


class DoesNotFit(MemoryError):
    """A model that the budgets have no room for. The message has the numbers, and what each setting would save."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of parameters while they are trained.

    Args:
        weights: of the parameters themselves.
        masters: of what a 16-bit weight's master has beside the weight.
        states: of the two moments and their scales.
        gradients: of the gradients.
    """

    weights: int = 0
    masters: int = 0
    states: int = 0
    gradients: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.weights + other.weights,
            self.masters + other.masters,
            self.states + other.states,
            self.gradients + other.gradients,
        )

    def __sub__(self, other: Footprint) -> Footprint:
        return self + Footprint(-other.weights, -other.masters, -other.states, -other.gradients)

    @property
    def kept(self) -> int:
        """Without the gradients, which come and go."""
        return self.weights + self.masters + self.states

    @property
    def total(self) -> int:
        return self.kept + self.gradients


Widths = Mapping[Tensor, tuple[int, int | None]]


def footprint(
    params: Iterable[Tensor], widths: Widths, nbytes: Callable[[Tensor], int] = lambda p: p.nbytes
) -> Footprint:
    """The bytes of parameters.

    Args:
        params: any parameters.
        widths: of those that are trained, (bits of a moment, bits of the master or None); see ``LowBitAdamW.widths``.
        nbytes: of a parameter where it rests.
    """
    total = Footprint()
    for p in params:
        bits, master = widths.get(p, (0, None))
        if not bits:
            total += Footprint(weights=nbytes(p))
            continue
        beside = {24: 1, 32: 4}.get(master or 0, 0) if p.dtype is not torch.float32 else 0
        gradient = gradient_dtype(p).itemsize * p.numel()
        total += Footprint(nbytes(p), beside * p.numel(), state_bytes(p.numel(), bits), gradient)
    return total


def state_bytes(n: int, bits: int) -> int:
    """Bytes of the two moments of ``n`` values, with their scales: what ``state.new_state`` makes."""
    if bits == 32:
        return 8 * n
    form = codec.STATES[bits]
    return 2 * form.nbytes(n) + 8 * form.blocks(n)


def readable(nbytes: int) -> str:
    """Bytes as "12.34 GB", "56.7 MB" or "890 kB", of 1e9, 1e6 and 1e3 bytes."""
    if nbytes >= 10**8:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 10**5 else f"{nbytes / 1e3:.0f} kB"


def spread(count: int, share: Fraction) -> list[int]:
    """Which of ``count`` blocks a share of them is: evenly spread, the first as late as possible."""
    return [i for i in range(count) if int((i + 1) * share) > int(i * share)]


PASSING_STATES = 4  # groups whose states are in RAM at a time, where they rest on a drive: read, stepped, written


@dataclass(frozen=True)
class Rest:
    """Where streamed blocks rest, and their states.

    Args:
        in_ram, on_drive: of the blocks.
        blocks: the states of so many of them, the last ones, are on the drive: they are needed last in forward.
        passing: bytes of RAM through which these pass.
    """

    in_ram: Footprint
    on_drive: Footprint = Footprint()
    blocks: int = 0
    passing: int = 0

    @classmethod
    def of(cls, homes: Sequence[Footprint], others: Footprint, budget: int | None, drive: bool) -> Rest:
        """RAM first: as few states go to the drive as the budget has no room for; with them go their masters.

        Args:
            homes: of each streamed block, in their order.
            others: what rests in RAM besides.
            budget: bytes of RAM; None: any.
            drive: whether there is one.
        """
        whole = sum(homes, others)
        if not drive or budget is None or whole.total <= budget:
            return cls(whole)
        passing = PASSING_STATES * max((home.masters + home.states for home in homes), default=0)
        gone = Footprint()
        for count, home in enumerate(reversed(homes), 1):
            gone += Footprint(masters=home.masters, states=home.states)
            rest = Footprint(whole.weights, whole.masters - gone.masters, whole.states - gone.states, whole.gradients)
            if rest.total + passing <= budget or count == len(homes):
                return cls(rest, gone, count, passing)
        return cls(whole)  # nothing is streamed

    @classmethod
    def least(cls, homes: Sequence[Footprint], others: Footprint) -> int:
        """The fewest bytes of RAM that it takes with a drive."""
        rest = cls.of(homes, others, 0, True)
        return min(sum(homes, others).total, rest.in_ram.total + rest.passing)


@dataclass(frozen=True)
class Plan:
    """Where a model rests.

    Args:
        blocks: number of its blocks.
        streamed: so many of them rest in RAM.
        on_gpu: what stays on the GPU, with its gradients of the moment when most memory is taken.
        in_ram: what rests in RAM.
        work: bytes of the GPU for everything else in that moment: activations, blocks passing through.
        gpu_budget, ram_budget: bytes that may be taken; None where nobody has said.
        on_drive: what rests on a drive.
        ram_work: bytes of RAM through which that passes.
    """

    blocks: int
    streamed: int
    on_gpu: Footprint
    in_ram: Footprint
    work: int
    gpu_budget: int | None = None
    ram_budget: int | None = None
    on_drive: Footprint = Footprint()
    ram_work: int = 0

    @property
    def gpu(self) -> int:
        """Bytes of the GPU at the peak."""
        return self.on_gpu.total + self.work

    @property
    def ram(self) -> int:
        """Bytes of RAM."""
        return self.in_ram.total + self.ram_work

    @property
    def offload(self) -> str:
        """The setting that equals it: a value of ``LowMemConfig.offload``."""
        return "cpu" if self.streamed == self.blocks else f"{self.streamed}/{self.blocks}" if self.streamed else "0"

    @property
    def fits(self) -> bool:
        """Whether it stays within its budgets."""
        return not self.lacking

    @property
    def lacking(self) -> int:
        """Bytes over the budgets."""
        sides = ((self.gpu, self.gpu_budget), (self.ram, self.ram_budget))
        return sum(max(0, needed - budget) for needed, budget in sides if budget is not None)

    def table(self) -> str:
        """What rests where."""
        names = ("weights", "masters", "states", "gradients")
        places = [self.on_gpu, self.in_ram, *([self.on_drive] if self.on_drive.total else [])]
        rows = [(name, *(getattr(place, name) for place in places)) for name in names]
        rows.append(("activations, blocks on their way", self.work, self.ram_work, 0))
        rows.append(("together", self.gpu, self.ram, self.on_drive.total))
        lines = ["".join([f"{'':<32}", *(f"{name:>10}" for name in ("GPU", "RAM", "drive")[: len(places)])])]
        for name, *sizes in rows:
            lines.append("".join([f"{name:<32}", *(f"{readable(size):>10}" for size in sizes[: len(places)])]))
        if self.gpu_budget is not None or self.ram_budget is not None:
            budgets = [f"{'' if b is None else readable(b):>10}" for b in (self.gpu_budget, self.ram_budget)]
            lines.append(f"{'of':<32}{''.join(budgets)}")
        return "\n".join(lines)

    def check(self, hints: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Raises: DoesNotFit where a budget is not kept.

        Args:
            hints: settings, and the bytes that each would save of the GPU and of RAM.
        """
        sides = (("GPU memory", self.gpu, self.gpu_budget), ("RAM", self.ram, self.ram_budget))
        for side, (name, needed, budget) in enumerate(sides):
            if budget is not None and needed > budget:
                saved = "; ".join(f"{hint} saves {readable(n[side])}" for hint, n in (hints or {}).items() if n[side])
                raise DoesNotFit(
                    f"needs {readable(needed)} of {name}, and {readable(budget)} may be taken, with {self.streamed} "
                    f"blocks in RAM{'; ' + saved if saved else ''}\n{self.table()}"
                )
