"""``Placement``: ``offload="auto"``. Which blocks stay on the GPU is found out by measuring the first step.

The first step streams every block, and the memory that it takes is noted block by block. From that, what each moment
would take with other blocks kept on the GPU is a sum. What is kept moves there with its gradients before the first
update, so that its optimizer states never exist in RAM. Where a block rests changes no bit of the training, so the
placement may change in any step: it does where a longer batch comes, and where the GPU runs out of memory all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

import torch

from .block import Block
from .code_updates import PIECE
from .memory import use_expandable_segments
from .optim import LowBitAdamW
from .plan import Footprint, Plan, Rest, footprint, readable, spread
from .stream import Streamer

CONTEXT = 600 * 10**6  # bytes of the GPU that CUDA itself takes in a process
# Of the GPU's memory, what fragmentation may take: with the allocator's expandable segments, and without. Measured on
# an 8B Llama shape under 24 GiB: without them 5.3 % were not enough. Where it is too little, see `_adjust`.
SLACK, SLACK_WITHOUT = 0.025, 0.08
LEAST_SLACK = 150 * 10**6
HINT = "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, more could stay."
PASSING_INPUTS = 3  # so many are on the GPU where they wait in RAM
ADJUSTMENTS = 8  # steps after the first in which their number may still change


class Memory(Protocol):
    """What a process takes of a device; see ``GpuMemory``."""

    limit: int
    hint: str

    def peak(self) -> int: ...
    def taken(self) -> int: ...
    def held(self) -> str: ...
    def retries(self) -> int: ...
    def tidy(self) -> None: ...


_fractions: dict[torch.device, float] = {}  # of the memory, that torch was last told here to stay within
_others: dict[torch.device, float] = {}  # what it had been told by others


def _fraction_of_others(device: torch.device) -> float:
    """The fraction of a GPU's memory that torch stays within, but for what an earlier Trainer has told it here."""
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return 1.0
    now = torch.cuda.get_per_process_memory_fraction(device)
    if now != _fractions.get(device):
        _others[device] = now
    return _others.get(device, 1.0)


class GpuMemory:
    """What torch takes of a GPU.

    Args:
        device: a CUDA device.
        budget: bytes that the process may take of it, its context included; torch is held to it. None: what is free.

    Attributes:
        available: bytes that torch's allocator may take.
        limit: bytes that tensors may take, which leaves some for fragmentation.
        hint: how that could be less; empty if it is little already.
    """

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        self.available = free + torch.cuda.memory_reserved(device)
        fraction = _fraction_of_others(device)
        self.available = min(self.available, int(fraction * total))
        if budget is not None:
            self.available = min(self.available, max(0, budget - CONTEXT))
            fraction = self.available / total
        if fraction > 0:  # or else nothing can be done, which is found out soon
            torch.cuda.set_per_process_memory_fraction(fraction, device)
            _fractions[device] = fraction
        expandable = use_expandable_segments()
        self._retries = 0
        share = SLACK if expandable else SLACK_WITHOUT
        self.hint = "" if expandable else HINT
        self.limit = max(0, self.available - max(LEAST_SLACK, int(self.available * share)))

    def peak(self) -> int:
        """The most bytes that tensors have taken since this was asked last."""
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def taken(self) -> int:
        """Bytes that tensors take now."""
        return torch.cuda.memory_allocated(self._device)

    def held(self) -> str:
        """The peaks since this was asked last, for a message."""
        reserved = torch.cuda.max_memory_reserved(self._device)
        return f"tensors {readable(self.peak())}, with what lies between them {readable(reserved)}"

    def retries(self) -> int:
        """How often, since this was asked last, torch had to give memory back to have enough in one piece."""
        before, self._retries = self._retries, torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
        return self._retries - before

    def tidy(self) -> None:
        """Gives back what the allocator keeps for later, in pieces that may not fit what comes."""
        torch.cuda.empty_cache()


def memory_of(device: torch.device, budget: int | None) -> Memory | None:
    """What is measured of a device; None where there is nothing to save."""
    return GpuMemory(device, budget) if device.type == "cuda" else None


def check_budgets(
    streamer: Streamer,
    optimizer: LowBitAdamW,
    outside: Footprint,
    gpu_budget: int | None,
    ram_budget: int | None,
    *,
    movable: bool,
    on_device: bool,
    gradients_rest: bool,
    drive: bool = False,
) -> None:
    """Says before the first step what cannot fit whatever the batch: the arithmetic without activations.

    Args:
        outside: of what is not streamed.
        gpu_budget, ram_budget: bytes; None: any.
        movable: whether blocks may be kept on the GPU where RAM is short.
        on_device: whether the optimizer keeps states where their parameters are.
        gradients_rest: whether gradients wait at home for the step.
        drive: whether states that RAM has no room for go to a drive.

    Raises: DoesNotFit.
    """
    widths = optimizer.widths()
    sizes = [footprint([p for _, p in block.params], widths, block.nbytes_of) for block in streamer.blocks]
    if not gradients_rest:
        sizes = [Footprint(s.weights, s.masters, s.states, 0) for s in sizes]
    copied = [block.copied_bytes for block in streamer.blocks]
    largest = max(block.largest_passing for block in streamer.blocks)
    behind = max((block.coded_layer or block.layer).nbytes for block in streamer.blocks)
    seen = any(block.forms for block in streamer.blocks)
    count = len(sizes)

    def plan(streamed: int) -> Plan:
        chosen = set(spread(count, Fraction(streamed, count)))
        there = sum((sizes[i] for i in range(count) if i not in chosen), outside)
        homes, others = [sizes[i] + Footprint(weights=copied[i]) for i in sorted(chosen)], Footprint()
        if not on_device:
            others = Footprint(there.weights, there.masters, there.states, 0)
            there = Footprint(weights=there.weights, gradients=there.gradients)
        rest = Rest.of(homes, others, ram_budget, drive)
        passing = (largest if streamed or seen else 0) + max(0, min(streamed - 1, streamer.ahead)) * behind
        return Plan(count, streamed, there, rest.in_ram, passing, gpu_budget, ram_budget, rest.on_drive, rest.passing)

    plans = [plan(streamed) for streamed in (range(count, -1, -1) if movable else [count])]
    if any(p.fits for p in plans):
        return
    best = min(plans, key=lambda p: p.lacking)
    gpu, ram = best.on_gpu, best.in_ram
    hints = {"max_grad_norm=0": (0, ram.gradients), "master_bits=16": (gpu.masters, ram.masters)}
    if not drive:
        there = [sizes[i] + Footprint(weights=copied[i]) for i in spread(count, Fraction(best.streamed, count))]
        hints["nvme_path"] = (0, best.ram - Rest.least(there, ram - sum(there, Footprint())))
    homes = [streamer.blocks[i] for i in spread(count, Fraction(best.streamed, count))]
    if all(form.bits == 8 and not block.bare for block in homes for form in block.forms.values()):
        hints["master_bits=8"] = (0, sum(p.nbytes for block in homes for p in block.forms) + bool(seen) * ram.masters)
    best.check(hints)


@dataclass(frozen=True)
class Moment:
    """A part of the first step.

    Args:
        peak: the most bytes taken in it.
        ended: numbers of the blocks whose gradients would be on the GPU in it if they were kept.
        passing: bytes of the blocks on their way through the GPU at its end.
        waiting: blocks whose inputs, or all activations, wait on the GPU for their backward.
    """

    peak: int
    ended: frozenset[int]
    passing: int
    waiting: int = 0


class Placement:
    """Keeps as many blocks on the device as there is room for.

    Args:
        streamer: of the model, with all blocks streamed.
        optimizer: of the model.
        outside: footprint of what is not in a block.
        memory: of the device.
        moved: is called when blocks have been moved: the optimizer must learn what is where.
        on_device: whether the optimizer keeps states where their parameters are.
        ram_budget: bytes of host memory for what is streamed; None: any.
        report: takes what is to be told to the user.
        drive: whether states that RAM has no room for go to a drive.
        offload_inputs: has the inputs of checkpointed blocks wait in RAM, if that lets more blocks stay than it costs;
            it returns of how many blocks. None: they stay where they are.

    Attributes:
        plan: what has been chosen; None before the first step has been measured.
    """

    def __init__(
        self,
        streamer: Streamer,
        optimizer: LowBitAdamW,
        outside: Footprint,
        memory: Memory,
        moved: Callable[[], object],
        on_device: bool = True,
        ram_budget: int | None = None,
        report: Callable[[str], None] = print,
        offload_inputs: Callable[[], int] | None = None,
        drive: bool = False,
    ) -> None:
        self.streamer, self.optimizer, self.memory, self.report = streamer, optimizer, memory, report
        self.plan: Plan | None = None
        self._moved, self._on_device, self._ram_budget, self._drive = moved, on_device, ram_budget, drive
        self._outside, self._offload_inputs = outside, offload_inputs
        widths = optimizer.widths()
        self._sizes = [footprint([p for _, p in block.params], widths, block.nbytes_of) for block in streamer.blocks]
        self._copied = [block.copied_bytes for block in streamer.blocks]
        self._seen = any(block.forms for block in streamer.blocks)  # beside the weights, by one block at a time
        parts = (footprint([p], widths) for block in streamer.blocks for _, p in block.params)
        self._part = max(part.masters + part.states + part.gradients for part in parts) + 2**16
        self._wide = 4 * PIECE if any(block.bare for block in streamer.blocks) else 0  # while these are updated
        self._cost = max(self._on_gpu(size).total for size in self._sizes)
        self._moments: list[Moment] = []
        self._ended: set[int] = set()
        self._levels: list[int] = []  # bytes taken when each block's forward begins, without what passes through
        self._waiting = 0
        self._measuring = False
        self._resting = 0  # bytes that are taken between two steps
        self._size = 0  # of the largest micro-batch so far
        self._adjustments = 0
        self._fewest = 0  # blocks that are to be streamed, whatever seems to be free
        self._stops = 0  # steps in a row in which memory had to be given back
        self._has_moved = False  # a block, since the last step

    # -- called by the Trainer --------------------------------------------------------------------------------------
    def before_forward(self, size: int) -> None:
        """Before the forward of each micro-batch.

        Args:
            size: values in its largest tensor, with which activations are taken to grow.
        """
        if self.plan is None and not self._measuring:
            self._measuring = True
            self._resting = self.memory.taken()
            self.memory.peak()
            self.streamer.observer = self._note
        elif self.plan is not None and size > self._size:
            self._make_room_for(size)
        self._size = max(self._size, size)

    def before_update(self) -> None:
        """When all gradients of a step are there, and before it is done."""
        if self._measuring:
            self._note(None, "update")
            self.streamer.observer, self._measuring = None, False
            self._choose()
        elif self.plan is not None and self._adjustments < ADJUSTMENTS:
            self._adjust()

    def start_again(self) -> None:
        """The first step is to be measured anew: it has not come to its end."""
        self.streamer.observer, self._measuring = None, False
        self._moments.clear()
        self._ended.clear()
        self._levels.clear()
        self._waiting = 0

    def make_room(self) -> bool:
        """Moves some blocks back to RAM, after the device has run out of memory. Returns whether there were any."""
        streamed = sum(not block.kept for block in self.streamer.blocks)
        count = len(self.streamer.blocks)
        if self.plan is None or streamed == count:
            return False
        streamed = min(count, streamed + max(1, count // 16))
        self._adjustments = ADJUSTMENTS
        held = self.memory.held()
        self._place(streamed)
        self.plan = self._planned(streamed)
        self.report(f"hf_lowmem: the GPU ran out of memory ({held}); {self._sentence()}")
        return True

    # -- measuring --------------------------------------------------------------------------------------------------
    def _note(self, block: Block | None, what: str) -> None:
        """Ends a moment. In a later micro-batch the gradients of all blocks are there already."""
        passing = self.streamer.passing_bytes
        self._moments.append(Moment(self.memory.peak(), frozenset(self._ended), passing, self._waiting))
        if what == "forward":
            self._levels.append(self.memory.taken() - passing)
            self._waiting += 1
        elif what == "end" and block is not None:
            self._ended.add(block.number)
            self._waiting = max(0, self._waiting - 1)

    def _planned(self, streamed: int, moments: Sequence[Moment] | None = None) -> Plan:
        """What it takes to stream so many blocks, by what was noted."""
        chosen = set(self._spread(streamed))
        kept = [i for i in range(len(self._sizes)) if i not in chosen]
        there = sum((self._on_gpu(self._sizes[i]) for i in kept), Footprint())
        outside = self._on_gpu(self._outside)
        missing = outside.masters + outside.states  # the first step comes when this has been measured
        if self._on_device and chosen:  # what travels with two blocks that are updated on the way
            missing += self.streamer.link.bags * self._part + self._wide
        largest = max(block.largest_passing for block in self.streamer.blocks)
        here = streamed + self._seen
        best, gradients = 0, 0
        for moment in self._moments if moments is None else moments:
            held = sum(self._sizes[i].gradients for i in kept if i in moment.ended)
            passing = max(0, moment.passing - here * largest)
            peak = moment.peak - passing + missing + there.kept + held
            if peak > best:
                best, gradients = peak, held + (outside.gradients if moment.ended else 0)
        on_gpu = Footprint(
            outside.weights + there.weights, outside.masters + there.masters, outside.states + there.states, gradients
        )
        others = Footprint()
        if not self._on_device:
            elsewhere = sum((self._sizes[i] for i in kept), self._outside)
            others = Footprint(elsewhere.weights, elsewhere.masters, elsewhere.states, 0)
        homes = [self._sizes[i] + Footprint(weights=self._copied[i]) for i in sorted(chosen)]
        rest = Rest.of(homes, others, self._ram_budget, self._drive)
        work, budgets = max(0, best - on_gpu.total), (self.memory.limit, self._ram_budget)
        return Plan(len(self._sizes), streamed, on_gpu, rest.in_ram, work, *budgets, rest.on_drive, rest.passing)

    def _on_gpu(self, size: Footprint) -> Footprint:
        return size if self._on_device else Footprint(weights=size.weights, gradients=size.gradients)

    # -- choosing ---------------------------------------------------------------------------------------------------
    def _choose(self) -> None:
        plan = self._least()
        if self._offload_inputs is not None and self._worth_offloading(plan):
            offload, self._offload_inputs = self._offload_inputs, None
            if offload():
                self.report("hf_lowmem: inputs of blocks wait in RAM, more blocks stay: offload_activations=true")
                self.start_again()  # the next step shows what that leaves
                return
        self.plan = plan
        replace(self.plan, gpu_budget=None).check()
        self._place(self.plan.streamed)
        hint = f"\n{self.memory.hint}" if self.memory.hint and self.plan.streamed else ""
        self.report(f"hf_lowmem: {self._sentence()}\n{self.plan.table()}{hint}")

    def _least(self, moments: Sequence[Moment] | None = None) -> Plan:
        """With as few blocks streamed as there is room for."""
        plans = (self._planned(streamed, moments) for streamed in range(len(self._sizes) + 1))
        plan = next((plan for plan in plans if plan.gpu <= self.memory.limit), None)
        return plan or self._planned(len(self._sizes), moments)  # a step went through with all of them streamed

    def _worth_offloading(self, plan: Plan) -> bool:
        """Whether inputs of blocks cost host memory less traffic in forward than the blocks that could stay instead.

        In forward a streamed block's weights are fetched, and updated: weights, masters and states are read and
        written, gradients read. An input is written.
        """
        growth = sorted(later - earlier for earlier, later in itertools.pairwise(self._levels))
        each = growth[len(growth) // 2] if growth else 0
        if each <= 0 or (plan.ram_budget is not None and plan.ram + each * plan.blocks > plan.ram_budget):
            return False
        less = [replace(m, peak=m.peak - each * max(0, m.waiting - PASSING_INPUTS)) for m in self._moments]
        fewer = plan.streamed - self._least(less).streamed
        size = max(self._sizes, key=lambda size: size.total)
        traffic = size.weights + (size.gradients + 2 * size.kept if size.gradients else 0)
        return fewer * traffic > each * plan.blocks

    def _adjust(self) -> None:
        """Corrects the number by what a step has really taken."""
        assert self.plan is not None
        self._adjustments += 1
        measured, streamed, retries = self.memory.peak(), self.plan.streamed, self.memory.retries()
        moved, self._has_moved = self._has_moved, False  # memory has only found its places then
        self._stops = self._stops + 1 if retries and not moved else 0
        if self._adjustments == 1:
            planned = self.plan.gpu
            self.report(f"hf_lowmem: peak of the GPU {measured / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB")
        over = measured - self.memory.limit  # below 0: room for so many blocks, rounded down
        wanted = max(0, min(len(self._sizes), streamed - (-over // self._cost)))
        if self._stops == 2:  # every step would stop for that
            self._fewest, self._stops = max(wanted, min(len(self._sizes), streamed + 1)), 0
        wanted = max(wanted, self._fewest)
        if wanted == streamed:
            if over <= 0 and not moved and not retries:
                self._adjustments = ADJUSTMENTS
            return
        self._place(wanted)
        self.plan = self._planned(wanted)
        self.report(f"hf_lowmem: {self._sentence()}")

    def _make_room_for(self, size: int) -> None:
        """Before a batch that is larger than all so far: activations grow with it."""
        assert self.plan is not None
        peak = max(moment.peak for moment in self._moments) - self._resting
        more = peak * (size / max(1, self._size) - 1)
        over = self.plan.gpu + more - self.memory.limit
        self._moments = [replace(m, peak=m.peak + int(more)) for m in self._moments]
        wanted = min(len(self._sizes), self.plan.streamed + max(0, -int(-over // self._cost)))
        moves = wanted > self.plan.streamed
        if moves:
            self._place(wanted)
        self.plan = self._planned(wanted)
        if moves:
            self.report(f"hf_lowmem: a larger batch has come; {self._sentence()}")

    def _place(self, streamed: int) -> None:
        chosen, self._has_moved = set(self._spread(streamed)), True
        blocks = self.streamer.blocks
        leaving = [block for i, block in enumerate(blocks) if block.kept and i in chosen]
        coming = [block for i, block in enumerate(blocks) if not block.kept and i not in chosen]
        self.optimizer.about_to_move(p for block in (*leaving, *coming) for _, p in block.params)
        try:
            for block in leaving:
                self.streamer.give_up(block)
            self.memory.tidy()
            for block in coming:
                self.streamer.keep(block)
        except torch.OutOfMemoryError:  # the block is where it was, and those behind it
            self._adjustments = ADJUSTMENTS
            self.report("hf_lowmem: the GPU ran out of memory while blocks moved to it; fewer stay than planned")
        finally:
            self._moved()
        if streamed and self._on_device:
            self.streamer.link.reserve(self._part)
        self.memory.peak()

    def _spread(self, streamed: int) -> Sequence[int]:
        return spread(len(self._sizes), Fraction(streamed, len(self._sizes)))

    def _sentence(self) -> str:
        assert self.plan is not None
        kept = self.plan.blocks - self.plan.streamed
        return (
            f"{kept} of {self.plan.blocks} blocks stay on the GPU, {self.plan.streamed} pass through it: "
            f'offload="{self.plan.offload}"'
        )
