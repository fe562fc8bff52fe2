"""``LowBitAdamW``: AdamW whose states rest in host RAM in few bits and are updated there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import rules
from . import state as states
from .adam_states import FORMAT, AdamStates, Work
from .code_updates import CodeUpdates
from .deferred import Deferred, Luggage, Weight
from .host import Item
from .kernels import native
from .kernels.adam import state_tensor
from .rules import check_gradient, param_bits
from .staging import all_finite

__all__ = ["LowBitAdamW", "param_bits"]
AT_WORK = 2  # groups that the CPU is given before the GPU gets its own: they keep it busy meanwhile
_Late = tuple[Tensor, dict[str, Any], Tensor]  # a parameter, its group and its flat gradient


class LowBitAdamW(AdamStates):
    """AdamW with 4-, 8- or 32-bit states in host RAM, for parameters in RAM or on a GPU.

    Bytes a parameter, bf16 weights, default recipe: states 1.06 (fp32 AdamW: 8), master 1 (4), so 2.06 beside the
    weight and its gradient. Caveat of each saving: 4-bit states are rounded stochastically, so a run depends on `seed`;
    a 24-bit master holds 8 bits less than an fp32 one; `master_bits=16` has none, and rounds the weight stochastically.

    A parameter on a GPU has its weight a second time in pinned RAM (2 bytes in bf16). Its gradient comes down on a
    side stream, already during backward as far as `staging_bytes` reach, and its new weight goes up while others are
    updated.

    Parameters of fewer than 4,096 values keep fp32 states; `param_bits` has the rule for others.

    Args:
        params: parameters, parameter groups, or named ones, in float32, bfloat16 or float16. A group may set lr, betas,
            eps, weight_decay, state_bits and master_bits of its own.
        state_bits: width of each of the two moments, 4, 8 or 32.
        master_bits: of a 16-bit weight: 24 (the weight and an 8-bit extension), 32 (an fp32 master), or 16 (no master,
            stochastic rounding). An fp32 weight is its own master.
        param_bits: width for single parameters, over their group's.
        threads: of the CPU kernel; None: physical cores less one. OMP_NUM_THREADS plays no part.
        seed: of all stochastic rounding.
        staging_bytes: bound of the pinned memory through which gradients come from a GPU.
        check_finite: look at every gradient before a step and skip the whole step where one is not finite. It reads the
            gradients once more. Without it, blocks with such gradients stay as they are and the others are updated.
        max_skipped_steps: that many skipped steps in a row raise FloatingPointError. None: never.
        maximize: must be False.

    Attributes:
        skipped_steps: steps skipped for gradients that were not finite.
        skipped_in_a_row: those since the last whole step.

    Raises:
        ValueError: an argument out of range.
        TypeError: a parameter of another dtype.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2. docs/numerics.md has the
    formats and their measurements.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: int = 4,
        master_bits: int = 24,
        param_bits: Mapping[Tensor, int] | None = None,
        threads: int | None = None,
        seed: int = 0,
        staging_bytes: int = 512 * 2**20,
        check_finite: bool = False,
        max_skipped_steps: int | None = None,
        maximize: bool = False,
    ) -> None:
        if maximize:
            raise ValueError("LowBitAdamW does not maximize: negate the loss instead.")
        rules.check_settings(threads, max_skipped_steps, staging_bytes, seed, param_bits or {})
        self.threads, self.seed, self.staging_bytes = threads, seed, staging_bytes
        self.check_finite, self.max_skipped_steps = check_finite, max_skipped_steps
        self.skipped_steps = self.skipped_in_a_row = 0
        self._skipped_in_ram: list[int] = []  # what is not 0, of all threads
        self._param_bits = dict(param_bits or {})
        self._deferred = Deferred()
        self._on_device: set[Tensor] = set()
        self._codes = CodeUpdates()
        self._drive = None
        self._reset_runtime()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_bits": state_bits,
            "master_bits": master_bits,
            "format": FORMAT,
        }
        super().__init__(params, defaults)

    def scale_gradients(self, scale: float, finite: bool = True) -> None:
        """Says what the next step's gradients are to be multiplied with: the clipping factor, without a pass over them.

        Args:
            scale: the factor; it holds for one step.
            finite: whether all gradients are finite, which whoever took their norm knows. False: the next step is
                skipped.
        """
        self._grad_scale, self._grads_finite = float(scale), bool(finite)

    def defer(
        self, groups: Iterable[Iterable[Tensor]], travels: int = 0, then: Callable[[int], object] | None = None
    ) -> None:
        """Lets updates of parameters in host memory go on after ``step`` has returned, group by group, in order.

        Whoever reads such a parameter, or writes its gradient's memory, waits first: ``wait`` for one group, or
        ``synchronize``. The arithmetic is that of a step at once.

        Args:
            groups: of parameters; they replace earlier ones.
            travels: so many groups at the beginning a GPU is expected to ``take`` at once; 0: none. States that may be
                taken rest in pinned memory.
            then: called in the thread that has updated a group, with its number, before ``wait`` returns.
        """
        lists = [list(group) for group in groups]
        for number, members in self._deferred.members.items():
            now = lists[number] if number < len(lists) else []
            if len(now) != len(members) or any(p is not q for p, q in zip(now, members, strict=True)):
                self._bring(number)  # or else it may rest on a drive as before
        self._deferred.set_groups(lists, travels, then)

    def keep_on_device(self, params: Iterable[Tensor]) -> None:
        """Keeps the states of these parameters on their device, and updates them there. Needs Triton.

        The bits are the same. What has a 32-bit master beside a 16-bit weight, or is not contiguous, stays as it was.
        States that exist move at once, so that whoever measures the device's memory sees them.

        Args:
            params: they replace earlier ones.
        """
        self._on_device = set(params)
        for p, group, _ in self._named():
            if self._stays(p, group) and self.state.get(p) and p not in self._host.homes:
                self._resident.prepare(p, self.state[p], self._wants(p, group))

    def wait(self, number: int) -> None:
        """Returns when the deferred updates of a group, by its number, are done."""
        self._deferred.wait(number)

    def take(
        self, number: int, weights: Mapping[Tensor, Tensor], grads: Mapping[Tensor, Tensor], seconds: float = 0.0
    ) -> Luggage | None:
        """Takes a group's deferred update away, for a GPU to do it; None if it has begun or cannot travel.

        Args:
            weights, grads: where the caller will copy them from, by parameter.
            seconds: that it will take the caller. It is not given what we shall have done by then.
        """
        return self._deferred.take(number, weights, grads, seconds)

    def done(self, number: int) -> bool:
        """Whether the deferred updates of a group are done."""
        return self._deferred.done(number)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Does one step.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            TypeError: a sparse or complex gradient; nothing has changed then.
            FloatingPointError: `max_skipped_steps` steps in a row had gradients that were not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, finite = self._grad_scale, self._grads_finite
        self._grad_scale, self._grads_finite = 1.0, None
        self._codes.look(self._named())
        staying, work = self._with_gradient()
        if finite is None and self.check_finite:
            finite = all_finite([p.grad for p, *_ in (*staying, *work) if p.grad is not None], self.threads)
        if finite is False:
            self._skip()
            return loss
        self.skipped_in_a_row = 0
        numbers = self._deferred.settle(p for p, *_ in work)
        self._prepare(work)
        self._make_states(staying)
        self._resident.look(resident := [(p, g, self.state[p], self._wants(p, g)) for p, g, _ in staying])
        at_once: list[Work] = []
        late: dict[int, list[_Late]] = {}
        for (p, group, name), number in zip(work, numbers, strict=True):
            home = p if p in self._codes else self._host.homes[p].resident
            if number is not None and p.grad is not None and home.data_ptr() == p.data_ptr():
                late.setdefault(number, []).append((p, group, p.grad.detach().contiguous().view(-1)))
            else:
                self._bring(number)
                at_once.append((p, group, name))
        order = self._deferred.in_order(late)
        for number in order[:AT_WORK]:
            self._update_late(number, late[number], scale)
        self._step_at_once([(p, group, self.state[p]) for p, group, _ in at_once], scale)
        self._resident.step(resident, self.seed, scale)
        for number in order[AT_WORK:]:
            self._update_late(number, late[number], scale)
        self._host.homes.written(p for p, *_ in work if p not in self._codes)
        self._resident.written(p for p, *_ in staying)
        return loss

    @torch.no_grad()
    def update(
        self, number: int, grads: Mapping[Tensor, Tensor], arrived: Callable[[], None], used: Callable[[], None]
    ) -> None:
        """Steps one deferred group before ``step``, which leaves it alone if its parameters have no ``grad`` by then.

        The gradients are taken as they are: unscaled, and a block of them that is not finite leaves its values alone.

        Args:
            number: of the group.
            grads: the gradient of each parameter that has one, in host memory, contiguous.
            arrived: returns when they are there; called in the thread that updates.
            used: called there when they have been read, also if that has failed.
        """
        self._deferred.wait(number)
        self._codes.look(self._named())
        groups = {p: group for p, group, _ in self._named() if p in grads}
        self._prepare([(p, group, "") for p, group in groups.items()])
        self._update_late(number, [(p, groups[p], g.view(-1)) for p, g in grads.items()], 1.0, arrived, used)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer.zero_grad. Zeros wait for deferred updates, which read the gradients."""
        if not set_to_none:
            self._deferred.wait()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Returns when every weight that a step has written is where its parameter is."""
        self._deferred.wait()
        self._host.stagings.synchronize()
        if self._drive is not None:
            self._drive.synchronize()

    @property
    def skipped_blocks(self) -> int:
        """Blocks left as they were in steps that were done all the same. Waits for parameters kept on a device."""
        return sum(self._skipped_in_ram) + self._resident.skipped_blocks()

    def _with_gradient(self) -> tuple[list[Work], list[Work]]:
        """All that have a gradient, each one checked: those that are updated where they are kept, and the others."""
        staying: list[Work] = []
        work: list[Work] = []
        for item in self._named():
            p, group, name = item
            if p.grad is None:
                continue
            check_gradient(p, name, stays := self._stays(p, group))
            if p.numel():
                (staying if stays else work).append(item)
        return staying, work

    def _skip(self) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        self._host.stagings.drop()
        if self.max_skipped_steps is not None and self.skipped_in_a_row >= self.max_skipped_steps:
            raise rules.too_many_skipped(self.skipped_in_a_row)

    def _update_late(
        self, number: int, items: Sequence[_Late], scale: float, arrived: Any = None, used: Any = None
    ) -> None:
        """Counts a group's step, and hands it to the thread, with the hyperparameters of today."""
        work, today = [], {id(g): {**g, "lr": float(g["lr"])} for g in self.param_groups}  # lr may be a tensor
        torch.autograd.graph.increment_version([p for p, *_ in items])
        for p, group, grad in items:
            state = self.state[p]
            state["step"] = step = state["step"] + 1
            work.append((p, today[id(group)], grad, step))
        self._host.homes.written(p for p, *_ in items if p not in self._codes)
        drive = self._drive if self._rests(number) else None

        def job(start: int, ending: Callable[[], object] | None) -> None:
            try:
                if arrived is not None:
                    arrived()
                if drive is None:
                    step_all(start, {}, ending)
                    return
                found, done = drive.open(number), False
                try:
                    step_all(start, found, ending)
                    done = True
                finally:
                    drive.close(number, changed=done)
            finally:
                if used is not None:
                    used()

        def step_all(start: int, there: Mapping[Tensor, Any], ending: Callable[[], object] | None) -> None:
            tensors, skipped = [], []
            for p, group, grad, step in work[start:]:
                state = {**self.state[p], **there.get(p, {})}
                if p in self._codes:
                    skipped.append(self._step_codes(p, group, grad, scale, step, state))
                else:
                    tensors.append(self._host.tensor((p, group, state), grad, self.seed, scale, step))
            skipped.append(native.adam_step(tensors, self.threads, ending if tensors else None))
            self._skipped_in_ram.extend(filter(None, skipped))

        luggage, stays = None, any(p in self._host.homes and self._host.homes[p].copy is not None for p, *_ in items)
        if drive is not None:
            drive.enqueue(number)
        if arrived is None and self._deferred.travels and not stays and drive is None:
            engine = partial(self._step_there, scale)
            luggage = self._deferred.pack(number, work, [self.state[p] for p, *_ in items], engine)
        self._deferred.add(number, job, [grad for *_, grad in items], arrived is None, luggage)

    def _step_at_once(self, work: list[Item], scale: float) -> None:
        skipped, how = 0, {"threads": self.threads, "staging_bytes": self.staging_bytes}
        for p, group, state in work:
            if p in self._codes and p.grad is not None:
                torch.autograd.graph.increment_version(p)
                skipped += self._step_codes(p, group, p.grad.detach().reshape(-1), scale, state["step"] + 1)
                state["step"] += 1
        work = [item for item in work if item[0] not in self._codes]
        in_ram = [item for item in work if item[0].device.type == "cpu"]
        skipped += self._host.step_in_ram(in_ram, self.seed, scale, self.threads)
        for device in {p.device for p, *_ in work} - {torch.device("cpu")}:
            here, known = [item for item in work if item[0].device == device], [p for p, *_ in self._named()]
            skipped += self._host.step_from_device(device, here, known, self.seed, scale, **how)
        self._skipped_in_ram.extend(filter(None, [skipped]))
        for _, _, state in work:
            state["step"] += 1

    def _step_codes(
        self, p: Tensor, group: Mapping[str, Any], grad: Tensor, scale: float, step: int, *there: Any
    ) -> int:
        state, *copies = there or (self.state[p],)
        return self._codes.step(p, group, state, grad, (self.seed, scale, step), self.threads, self._resident, *copies)

    def _step_there(
        self, scale: float, p: Tensor, group: Mapping[str, Any], state: states.State, weight: Weight, *rest: Any
    ) -> None:
        grad, step = rest
        if isinstance(weight, tuple):
            skipped = self._step_codes(p, group, grad, scale, step, state, weight)
        else:
            tensor = state_tensor(state, group, self.seed, weight.view(-1), grad, scale, step)
            skipped = self._resident.step_anywhere([tensor], self.threads)
        self._skipped_in_ram.extend(filter(None, [skipped]))
