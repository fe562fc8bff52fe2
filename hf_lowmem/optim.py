"""``LowBitAdamW``: AdamW whose states rest in host RAM in few bits and are updated there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import rules
from . import state as states
from .code_updates import CodeUpdates, drop_codes, take_codes, with_codes
from .deferred import Deferred, Luggage, Weight
from .host import HostUpdates, Item
from .kernels import native
from .kernels.adam import state_tensor
from .resident import ResidentUpdates, state_in_ram
from .rules import SMALLEST_LOW_BIT, check_gradient, check_group, param_bits
from .staging import all_finite

__all__ = ["LowBitAdamW", "param_bits"]
FORMAT = 1  # of the state dict
AT_WORK = 2  # groups that the CPU is given before the GPU gets its own: they keep it busy meanwhile
_Work = tuple[Tensor, dict[str, Any], str]  # a parameter, its group and its name
_Late = tuple[Tensor, dict[str, Any], Tensor]  # a parameter, its group and its flat gradient


class LowBitAdamW(torch.optim.Optimizer):
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

    def _reset_runtime(self) -> None:
        self._host = HostUpdates()
        self._deferred.forget()
        self._resident = ResidentUpdates()
        self._grad_scale = 1.0
        self._grads_finite: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        self._deferred.wait()
        left_out = {"_host", "_codes", "_deferred", "_resident", "_on_device", "_grad_scale", "_grads_finite"}
        # A scheduler puts its wrapper of `step` into the instance: it is bound to this one, so it stays here too.
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in left_out and not key.endswith("_hooks") and not callable(value)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._deferred, self._on_device, self._codes = Deferred(), set(), CodeUpdates()
        self._reset_runtime()

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, for example ones unfrozen late; see torch.optim.Optimizer.add_param_group."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

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
        self._deferred.set_groups(groups, travels, then)

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

    def use_codes(self, codes: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
        """Says which weights rest in 8 bits alone, and where; see ``code_updates``. Their states move there.

        Args:
            codes: of parameters, codes and scales of form ``int8``, which steps change; they replace earlier ones.
        """
        self._deferred.wait()
        self._codes.codes = dict(codes)
        for p, *_ in self._named():
            if p in self._codes and self.state.get(p):
                take_codes(self.state[p], self._codes.codes[p])

    def widths(self) -> dict[Tensor, tuple[int, int | None]]:
        """Of each parameter, the bits of a moment, and those of its master; None for an fp32 weight."""
        return {p: (self._bits(p, group), self._wants(p, group)) for p, group, _ in self._named()}

    @torch.no_grad()
    def about_to_move(self, params: Iterable[Tensor]) -> None:
        """Says that somebody is going to move these parameters to another device or place, with their values.

        Masters are made to fit the weights as they are now; where those lie is forgotten.

        Args:
            params: to be moved before the next step.
        """
        self._deferred.wait()
        moved = set(params)
        work = [(p, group, "") for p, group, _ in self._named() if p in moved and self.state.get(p)]
        self._prepare([item for item in work if item[0] in self._host.homes])
        for p, group, _ in work:
            if p in self._codes:
                self.state[p].update(state_in_ram(self.state[p]))
            if self._resident.knows(p):
                self._resident.prepare(p, self.state[p], self._wants(p, group))
                self.state[p].update(state_in_ram(self.state[p]))  # at once: the device may need the room
        for p in moved:
            self._host.homes.forget(p)
            self._resident.forget(p)

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
        at_once: list[_Work] = []
        late: dict[int, list[_Late]] = {}
        for (p, group, name), number in zip(work, numbers, strict=True):
            home = p if p in self._codes else self._host.homes[p].resident
            if number is not None and p.grad is not None and home.data_ptr() == p.data_ptr():
                late.setdefault(number, []).append((p, group, p.grad.detach().contiguous().view(-1)))
            else:
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

    @property
    def skipped_blocks(self) -> int:
        """Blocks left as they were in steps that were done all the same. Waits for parameters kept on a device."""
        return sum(self._skipped_in_ram) + self._resident.skipped_blocks()

    def _with_gradient(self) -> tuple[list[_Work], list[_Work]]:
        """All that have a gradient, each one checked: those that are updated where they are kept, and the others."""
        staying: list[_Work] = []
        work: list[_Work] = []
        for item in self._named():
            p, group, name = item
            if p.grad is None:
                continue
            check_gradient(p, name, stays := self._stays(p, group))
            if p.numel():
                (staying if stays else work).append(item)
        return staying, work

    def _stays(self, p: Tensor, group: Mapping[str, Any]) -> bool:
        return p in self._on_device and p.is_contiguous() and self._wants(p, group) != 32

    def _named(self) -> Iterable[_Work]:
        number = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                yield p, group, names[i] if names else f"parameter {number}"
                number += 1

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

        def job(start: int, ending: Callable[[], object] | None) -> None:
            try:
                if arrived is not None:
                    arrived()
                tensors, skipped = [], []
                for p, group, grad, step in work[start:]:
                    if p in self._codes:
                        skipped.append(self._step_codes(p, group, grad, scale, step))
                    else:
                        tensors.append(self._host.tensor((p, group, self.state[p]), grad, self.seed, scale, step))
                skipped.append(native.adam_step(tensors, self.threads, ending if tensors else None))
                self._skipped_in_ram.extend(filter(None, skipped))
            finally:
                if used is not None:
                    used()

        luggage, stays = None, any(p in self._host.homes and self._host.homes[p].copy is not None for p, *_ in items)
        if arrived is None and self._deferred.travels and not stays:
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

    def _prepare(self, work: list[_Work]) -> None:
        """Makes states and homes that do not exist yet, and takes weights anew that somebody else has written."""
        self._make_states(work)
        found = []
        for p, group, _ in work:
            state, wanted = self.state[p], self._wants(p, group)
            if p in self._codes:
                take_codes(state, self._codes.codes[p])
                continue
            drop_codes(state)
            if self._resident.knows(p):  # it was updated on its device so far
                self._resident.prepare(p, state, wanted)
                self._resident.forget(p)
            if not state["m"].is_cpu:
                state.update(state_in_ram(state))
            found.append((p, state, wanted))
        self._host.homes.prepare(found)

    def _make_states(self, work: list[_Work]) -> None:
        numbers: dict[Tensor, int] = {}
        for p, group, _ in work:
            if not self.state[p]:
                numbers = numbers or {q: i for i, (q, _, _) in enumerate(self._named())}
                self.state[p] = states.new_state(p.numel(), self._bits(p, group), numbers[p])

    def _bits(self, p: Tensor, group: Mapping[str, Any]) -> int:
        return 32 if p.numel() < SMALLEST_LOW_BIT else self._param_bits.get(p, group["state_bits"])

    def _wants(self, p: Tensor, group: Mapping[str, Any]) -> int | None:
        """Bits of the master that a parameter is to have; None for an fp32 weight, which is its own."""
        return None if p.dtype is torch.float32 or p in self._codes else group["master_bits"]

    # -- saving, loading, counting ----------------------------------------------------------------------------------
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, of this class or of torch.optim.AdamW, into memory of our own.

        States of fewer bits are widened (4 to 8 to 32, a 24-bit master to 32); the widths of this optimizer stay. The
        weights are read at the next step, so it does not matter whether the model is loaded before or after.

        Raises:
            ValueError: groups or parameters that do not match, a damaged state, or one of more bits than this
                optimizer has. Nothing has changed then.
        """
        self._deferred.wait()
        self._codes.look(self._named())
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = rules.loaded_groups(state_dict, self.param_groups, FORMAT)
        ids = [i for g in state_dict["param_groups"] for i in g["params"]]
        loaded: dict[Tensor, states.State] = {}
        for number, (key, (p, group, name)) in enumerate(zip(ids, self._named(), strict=True)):
            if key in state_dict["state"]:
                bits, master = self._bits(p, group), 8 if p in self._codes else self._wants(p, group)
                saved = state_dict["state"][key]
                loaded[p] = states.load_state(saved, p.numel(), bits, master, number, name)
                if p in self._codes:
                    loaded[p] = with_codes(loaded[p], saved, self._codes.codes[p], name)
        self.param_groups = groups
        self.state.clear()
        self.state.update(loaded)
        self._host.stagings.close()
        self._reset_runtime()
        self.use_codes(self._codes.codes)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer.state_dict."""
        self._deferred.wait()
        saved = super().state_dict()
        return {**saved, "state": {key: state_in_ram(state) for key, state in saved["state"].items()}}

    def nbytes(self) -> dict[str, int]:
        """What it holds so far: number of ``parameters``, bytes of their ``states`` and ``master``."""
        return states.held(self.state)
