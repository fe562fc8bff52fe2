"""Where the kernel finds a parameter's weight between two steps, and how one that somebody has written is taken in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import codec
from .memory import PinnedArena
from .staging import sum_of_bits
from .state import State

Mark = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def mark(p: Tensor) -> Mark:
    """What changes when somebody else writes a parameter, short of writing through ``.data``."""
    return p.data_ptr(), p._version, p.shape, p.stride(), p.dtype, p.device


@dataclass
class Home:
    """Where the kernel finds a parameter's weight between two steps: the parameter itself, or its copy in RAM.

    Attributes:
        weight: the flat weight that the kernel reads and writes, or its fp32 master.
        resident: the flat weight in the parameter's dtype: `weight`, or what the kernel writes beside a master.
        seen: what the parameter was like after our last write; see `mark`.
        total: of a parameter on a GPU, the sum of its bits then, on the GPU.
    """

    weight: Tensor
    resident: Tensor
    seen: Mark
    total: Tensor | None = None

    @property
    def copy(self) -> Tensor | None:
        return None if self.weight is self.resident else self.resident


def take_weight(p: Tensor, state: State, home: Home, old: Home | None, wanted: int | None) -> None:
    """Reads a parameter's weight into its home and makes its master fit it.

    Where a value is what it was, its master stays; where somebody has written another one, the master starts at it.

    Args:
        p: the parameter.
        state: its state, whose master is made or changed.
        home: its home, which is changed.
        old: the home so far; None if there was none, and the state's master, if any, was made or loaded with the
            weight.
        wanted: bits of the master that it is to have; None for a weight that is its own.
    """
    before = None if old is None else old.resident
    if p.device.type == "cpu":
        now = p.data.contiguous().view(-1)  # whose writes are not counted: a step that goes on counts its own first
        unknown = before is not None and before.data_ptr() == now.data_ptr()  # overwritten: nobody knows by what
    else:
        before = None if before is None else before.clone()
        now, unknown = home.resident, False
        now.copy_(p.detach().reshape(-1))
    same = None
    if before is not None:
        same = torch.zeros_like(now, dtype=torch.bool) if unknown else codec.bits_of(before) == codec.bits_of(now)
    extension, master = state.pop("extension", None), state.pop("master", None)
    home.weight = home.resident = now
    if wanted == 24:
        empty = torch.zeros(p.numel(), dtype=torch.int8)
        kept = empty if extension is None else extension
        state["extension"] = kept if same is None else torch.where(same, kept, empty)
    elif wanted == 32:
        if master is not None:  # where it does not round to the weight it is not this weight's
            fits = master.to(p.dtype) == now
            master = master if bool(fits.all()) else torch.where(fits, master, now.float())
        elif extension is not None:
            master = codec.join_master(now, extension if same is None else torch.where(same, extension, 0))
        state["master"] = home.weight = now.float() if master is None else master
    home.seen = mark(p)


class Homes:
    """The homes of an optimizer's parameters, by parameter."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Home] = {}
        self._arenas: list[PinnedArena] = []

    def __contains__(self, p: Tensor) -> bool:
        return p in self._of

    def __getitem__(self, p: Tensor) -> Home:
        return self._of[p]

    def forget(self, p: Tensor) -> None:
        """Forgets where a parameter's weight is. Its master is in its state."""
        self._of.pop(p, None)

    def prepare(self, work: Sequence[tuple[Tensor, State, int | None]]) -> None:
        """Makes homes that do not exist yet, and takes weights anew that somebody else has written.

        Args:
            work: (parameter, its state, bits of the master that it is to have; None for a weight that is its own).
        """
        fresh, rewritten = [], self._rewritten_on_gpu([p for p, _, _ in work if p.device.type != "cpu"])
        for p, state, wanted in work:
            home, now = self._of.get(p), mark(p)
            if home is None or home.seen[2:] != now[2:]:  # another shape, layout, dtype or device
                fresh.append((p, state, wanted))
            elif home.seen != now or (rewritten and p in rewritten) or wanted != _master_bits(p, state):
                take_weight(p, state, home, home, wanted)
            elif p.device.type == "cpu" and (home.copy is not None or not p.is_contiguous()):
                # the parameter is not what the kernel reads: it may differ unnoticed
                take_weight(p, state, home, home, wanted)
        places = self._residents([p for p, _, _ in fresh])
        for (p, state, wanted), resident in zip(fresh, places, strict=True):
            self._of[p] = Home(resident, resident, mark(p))
            take_weight(p, state, self._of[p], None, wanted)

    def is_current(self, p: Tensor, state: State, wanted: int | None) -> bool:
        """Whether ``prepare`` would leave a parameter in RAM, its home and its master as they are."""
        home = self._of.get(p)
        kept = home is not None and home.copy is None and home.seen == mark(p) and wanted == _master_bits(p, state)
        return kept and p.device.type == "cpu" and p.is_contiguous()

    def written(self, params: Iterable[Tensor]) -> None:
        """Remembers what parameters are like after the last write of a step: pieces of one tensor share its counter."""
        for p in params:
            home = self._of[p]
            home.seen = (home.seen[0], p._version, *home.seen[2:])

    def _residents(self, params: list[Tensor]) -> list[Tensor]:
        """Where each parameter's flat weight is to lie in RAM: pinned memory for those on a GPU."""
        found: dict[Tensor, Tensor] = {}
        for device in {p.device for p in params if p.device.type != "cpu"}:
            here = [p for p in params if p.device == device]
            with torch.cuda.device(device):
                arena = PinnedArena([p.numel() * p.element_size() for p in here])
            self._arenas.append(arena)
            found |= {p: part.view(p.dtype) for part, p in zip(arena.parts, here, strict=True)}
        return [found.get(p, torch.empty(0, dtype=p.dtype)) for p in params]

    def _rewritten_on_gpu(self, params: list[Tensor]) -> set[Tensor]:
        """Parameters on a GPU that are not what we wrote last, whoever has written them and however."""
        changed: set[Tensor] = set()
        known = [p for p in params if p in self and self[p].total is not None and p.device.type != "cpu"]
        for device in {p.device for p in known}:
            here = [p for p in known if p.device == device]
            totals = [t for p in here if (t := self[p].total) is not None and t.device == device]
            if len(totals) < len(here):  # some have moved here: `seen` says so
                continue
            same = torch.stack(totals) == torch.stack([sum_of_bits(p) for p in here])
            changed |= {p for p, equal in zip(here, same.tolist(), strict=True) if not equal}
        return changed


def _master_bits(p: Tensor, state: State) -> int | None:
    if p.dtype is torch.float32:
        return None
    return 32 if "master" in state else 24 if "extension" in state else 16
