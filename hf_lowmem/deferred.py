"""``Deferred``: updates that go on after a step; ``Luggage``: one that a GPU does, for it needs the weights at once.

The states travel with the weights, are updated on the GPU, and go home again: a CPU's cores are bound by how much
memory each of them can ask for, and what a GPU copies comes on top of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .drive_states import layer_of, tensors_of
from .late import LateUpdates
from .layer import Spec
from .link import ALIGN, Link, Slot
from .memory import PinnedArena, trim
from .state import State

Work = Sequence[tuple[Tensor, Mapping[str, Any], Tensor, int]]
Weight = Tensor | tuple[Tensor, Tensor]  # or codes and scales
Engine = Callable[[Tensor, Mapping[str, Any], State, Weight, Tensor, int], object]

# A GPU takes an update only if it has it so many times sooner than the CPU: what it copies slows the CPU. Measured on
# 16 cores beside an H200: 9.1 G parameters/s with copies down alone, 6.7 with copies both ways, which bring 2 or 3.
MARGIN = 2.0


class StateSlab:
    """The optimizer states of some parameters in one piece of host memory, which moves as a whole.

    Args:
        states: whose tensors move here; they keep their names and become views. Codes of a weight stay where they are.
        pin: whether a GPU is to copy them.
    """

    def __init__(self, states: Sequence[State], pin: bool) -> None:
        layer = layer_of(states)
        self._specs: list[dict[str, Spec]] = [{} for _ in states]
        for spec in layer.specs:
            self._specs[int(spec.name.split()[0])][spec.name.split()[1]] = spec
        self._arena = PinnedArena([layer.nbytes]) if pin else None  # which must live as long as its part
        self.home = self._arena.parts[0] if self._arena else torch.empty(layer.nbytes, dtype=torch.uint8)
        memory = self.home.numpy()
        for state, specs in zip(states, self._specs, strict=True):
            for key, spec in specs.items():
                # A storage of its own, though of shared memory: torch.save refuses several types in one storage.
                place = torch.frombuffer(memory, dtype=spec.dtype, count=state[key].numel(), offset=spec.offset)
                place.copy_(state[key])
                state[key] = place
        self._places = [(set(state), tensors_of(state)) for state in states]

    def holds(self, states: Sequence[State]) -> bool:
        """Whether the tensors of these states are the ones that lie here, and no others."""
        return len(states) == len(self._places) and all(
            state.keys() == keys and all(state[key] is place for key, place in places.items())
            for state, (keys, places) in zip(states, self._places, strict=True)
        )

    def part(self, number: int) -> Tensor:
        """The bytes of one state, by its number among those given."""
        start, stop = self._span(number)
        return self.home[start:stop]

    def unpack(self, number: int, part: Tensor) -> dict[str, Tensor]:
        """The tensors of a state within a copy of its bytes, wherever that is."""
        start, _ = self._span(number)
        specs = self._specs[number]
        return {key: replace(spec, offset=spec.offset - start).view(part) for key, spec in specs.items()}

    def _span(self, number: int) -> tuple[int, int]:
        specs = list(self._specs[number].values())
        return specs[0].offset, specs[-1].offset + specs[-1].nbytes


# Does a group's update from the parameter of this number on; its other argument is that of ``LateUpdates``' jobs.
Job = Callable[[int, Callable[[], object] | None], None]


def guarded(job: Job, grads: Sequence[Tensor]) -> Job:
    """A deferred update that raises RuntimeError where somebody has written its gradients meanwhile."""
    versions = [grad._version for grad in grads]

    def check() -> None:
        if [grad._version for grad in grads] != versions:
            raise RuntimeError(
                "a gradient was written while the update by it was under way, which may have gone wrong: call "
                "zero_grad(set_to_none=True), or wait with streamer.synchronize() first"
            )

    def watched(start: int, ending: Callable[[], object] | None) -> None:
        check()
        job(start, ending)
        check()

    return watched


@dataclass(frozen=True)
class Luggage:
    """A deferred step of one group of parameters, of the values that hyperparameters had when it was due.

    Args:
        work: (parameter, its group, its flat gradient in host memory, number of its step) of each.
        versions: of these gradients when the step was due.
        states: of these parameters.
        slab: where the states lie.
        engine: steps a parameter: it takes (parameter, its group, its state there, its weight or codes and scales
            there, its gradient there, number of the step).
        hand_over: takes over from the CPU: (returns when all is at home again, whether it is).
        put_back: has the CPU do the rest after all: (number of the first parameter that is left, returns when those
            before it are at home).
    """

    work: Work
    versions: Sequence[int]
    states: Sequence[State]
    slab: StateSlab
    engine: Engine
    hand_over: Callable[[Callable[[], None], Callable[[], bool]], None]
    put_back: Callable[[int, Callable[[], None]], None]

    def fits(self, weights: Mapping[Tensor, Tensor], grads: Mapping[Tensor, Tensor]) -> bool:
        """Whether the homes of weights and gradients, by parameter, are what this step is about."""
        return all(
            p in weights
            and p in grads
            and weights[p].data_ptr() == p.data_ptr()
            and grads[p].data_ptr() == grad.data_ptr()
            and grads[p].dtype is grad.dtype
            and grad._version == version
            for (p, _, grad, _), version in zip(self.work, self.versions, strict=True)
        )

    def parts(self, weights: Mapping[Tensor, Weight]) -> list[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], None]]]:
        """What is to be done, one parameter after another.

        Args:
            weights: copies on the device, by parameter; they are changed there.

        Returns: of each parameter, its state's bytes in host memory, which a step changes, its gradient's bytes there,
            and the step, which takes copies of both.
        """

        def part(i: int) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], None]]:
            p, group, home, number = self.work[i]

            def step(state: Tensor, grad: Tensor) -> None:
                there = {**self.states[i], **self.slab.unpack(i, state)}
                self.engine(p, group, there, weights[p], grad.view(home.dtype), number)

            return self.slab.part(i), home.view(torch.uint8), step

        return [part(i) for i in range(len(self.work))]

    def travel(self, link: Link, slot: Slot, home: Tensor, weights: Mapping[Tensor, Weight]) -> Any:
        """Brings a layer to the device, has it updated there, and sends its weights and states home.

        Args:
            slot, home: of the layer.
            weights: views of the slot, by parameter: of its weight, or of its codes and scales.

        Returns: the ticket of the layer's fetch.
        """
        parts, done = self.parts(weights), 0
        try:
            link.begin(slot, home, max(state.numel() + grad.numel() for state, grad, _ in parts) + 2 * ALIGN)
            for part in parts:
                link.update(part)
                done += 1
        except BaseException:  # no memory, or Ctrl-C: the rest is the CPU's again
            sent = link.end(slot, home)[1] if done else None
            self.put_back(done, lambda: None if sent is None else link.arrived(sent))
            link.release(slot)
            raise
        ticket, sent = link.end(slot, home)
        self.hand_over(lambda: link.arrived(sent), lambda: link.has_arrived(sent))
        return ticket


class Deferred:
    """The deferred updates of an optimizer, by number of their group.

    [Note: who does what] The CPU does one group after another. A GPU that needs one which is still far behind takes it
    away and does it itself: the two meet in the middle of the queue all the time. The first groups are needed at once,
    so the CPU leaves them to the end of its queue where a GPU will take them.

    Attributes:
        groups, members: the number of each parameter that is deferred, and the parameters of each number.
        travels: so many groups at the beginning a GPU is expected to take; 0: it takes none at all.
        then: is called with a group's number when the CPU has done its update, before others may see it.
    """

    def __init__(self) -> None:
        self.groups: dict[Tensor, int] = {}
        self.members: dict[int, list[Tensor]] = {}
        self.travels = 0
        self.then: Callable[[int], object] | None = None
        self._late = LateUpdates()
        self._slabs: dict[int, StateSlab] = {}
        self._queue: dict[int, tuple[Job, Luggage | None, int]] = {}  # with the number of values
        self._taken: dict[int, Job] = {}
        self._seconds = 0.0  # that the CPU takes for a value, lately
        self._ended = 0.0  # when the latest job was over

    def set_groups(
        self, groups: Iterable[Iterable[Tensor]], travels: int, then: Callable[[int], object] | None = None
    ) -> None:
        """Replaces the groups, once earlier updates are done."""
        self.wait()
        self.then = then
        self.members = {number: list(group) for number, group in enumerate(groups)}
        self.groups = {p: number for number, group in self.members.items() for p in group}
        self.travels = travels
        numbers = set(self.groups.values()) if travels else set()
        self._slabs = {number: slab for number, slab in self._slabs.items() if number in numbers}

    def forget(self) -> None:
        """Waits for all updates, and forgets where states are: they have been replaced, or are about to be."""
        self.wait()
        self._slabs.clear()

    def in_order(self, numbers: Iterable[int]) -> list[int]:
        """Groups in the order in which they are to be added."""
        ordered = sorted(numbers)
        return ordered[self.travels :] + ordered[: self.travels]

    def pack(
        self,
        number: int,
        work: Work,
        states: Sequence[State],
        engine: Engine,
    ) -> Luggage:
        """A group's next update as luggage; see there. Nobody may be updating the states."""
        slab = self._slabs.get(number)
        if slab is None or not slab.holds(states):
            slab = self._slabs[number] = StateSlab(states, pin=torch.cuda.is_available())
            trim()  # the states have been somewhere else before
        versions = [grad._version for _, _, grad, _ in work]
        ways = partial(self._hand_over, number), partial(self._put_back, number)
        return Luggage(work, versions, states, slab, engine, *ways)

    def add(
        self,
        number: int,
        job: Job,
        grads: Sequence[Tensor],
        there: bool,
        luggage: Luggage | None = None,
    ) -> None:
        """Has the CPU do a group's update, behind those before it, unless somebody takes the luggage.

        Args:
            job: does it.
            grads: what it reads.
            there: whether they have arrived, so that nobody has to write them any more.
        """
        job, values = guarded(job, grads) if there else job, sum(grad.numel() for grad in grads)

        def timed(ending: Callable[[], None]) -> None:
            start = time.perf_counter()
            job(0, ending)
            if self.then is not None:
                self.then(number)
            end = time.perf_counter()  # what began before another's end had only the cores that that one left
            seconds = (end - max(start, self._ended)) / max(values, 1)
            self._seconds = seconds if self._seconds == 0 else 0.8 * self._seconds + 0.2 * seconds
            self._ended = end

        self._late.add(number, timed)
        self._queue[number] = job, luggage, values

    def take(
        self, number: int, weights: Mapping[Tensor, Tensor], grads: Mapping[Tensor, Tensor], seconds: float
    ) -> Luggage | None:
        """See ``LowBitAdamW.take``."""
        luggage = self._queue[number][1] if number in self._queue else None
        if luggage is None or not luggage.fits(weights, grads) or MARGIN * seconds > self._seconds_until(number):
            return None
        if not self._late.take(number):
            return None
        self._taken[number] = self._queue.pop(number)[0]
        return luggage

    def _hand_over(self, number: int, wait: Callable[[], None], query: Callable[[], bool]) -> None:
        del self._taken[number]  # with the gradients that it would read
        self._late.done_elsewhere(number, wait, query)

    def _put_back(self, number: int, start: int, wait: Callable[[], None]) -> None:
        job = self._taken.pop(number)

        def rest(ending: Callable[[], None]) -> None:
            wait()
            job(start, ending)
            if self.then is not None:
                self.then(number)

        self._late.add(number, rest)

    def _seconds_until(self, number: int) -> float:
        """How long it will be before the CPU has done a group."""
        values, first = 0.0, True
        for n, (_, _, count) in self._queue.items():
            state = self._late.state(n)
            if state != "done":
                values += count / 2 if first and state == "running" else count
                first = False
            if n == number:
                break
        return values * self._seconds

    def wait(self, number: int | None = None) -> None:
        """Returns when a group's update, or all, are done. Raises: what has gone wrong in it."""
        if number is None:
            self._queue.clear()
        else:
            self._queue.pop(number, None)
            self._late.hurry(number)  # it may be the last one
        self._late.wait(number)

    def settle(self, params: Iterable[Tensor]) -> list[int | None]:
        """The number of each parameter's group, or None, once earlier updates of these groups are done."""
        numbers = [self.groups.get(p) for p in params]
        for number in set(numbers) - {None}:
            self.wait(number)
        return numbers

    def done(self, number: int) -> bool:
        """Whether a group's update is done."""
        return self._late.done(number)
