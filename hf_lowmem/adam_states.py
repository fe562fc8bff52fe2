"""``AdamStates``: what an AdamW of ours holds of each parameter: made, moved, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import rules
from . import state as states
from .code_updates import CodeUpdates, drop_codes, take_codes, with_codes
from .deferred import Deferred
from .drive_states import DriveStates, Extents, grouped, layer_of, tensors_of
from .host import HostUpdates
from .resident import ResidentUpdates, state_in_ram
from .rules import SMALLEST_LOW_BIT, check_group

FORMAT = 1  # of the state dict
Work = tuple[Tensor, dict[str, Any], str]  # a parameter, its group and its name


class AdamStates(torch.optim.Optimizer):
    """Holds the states and masters of parameters, in host RAM or on their device; ``LowBitAdamW`` steps them."""

    _param_bits: dict[Tensor, int]
    _on_device: set[Tensor]
    _drive: DriveStates | None

    def _reset_runtime(self) -> None:
        self._host = HostUpdates()
        self._deferred.forget()
        self._resident = ResidentUpdates()
        self._grad_scale = 1.0
        self._grads_finite: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        self._deferred.wait()
        left_out = {"_host", "_codes", "_deferred", "_resident", "_on_device", "_drive", "_grad_scale", "_grads_finite"}
        # A scheduler puts its wrapper of `step` into the instance: it is bound to this one, so it stays here too.
        kept = {
            key: value
            for key, value in self.__dict__.items()
            if key not in left_out and not key.endswith("_hooks") and not callable(value)
        }
        return {**kept, "state": self._states_with_data()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._deferred, self._on_device, self._codes, self._drive = Deferred(), set(), CodeUpdates(), None
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

    def use_codes(self, codes: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
        """Says which weights rest in 8 bits alone, and where; see ``code_updates``. Their states move there.

        Args:
            codes: of parameters, codes and scales of form ``int8``, which steps change; they replace earlier ones.
        """
        self._deferred.wait()
        self._codes.codes = dict(codes)
        for p, *_ in self._named():
            if p in self._codes and self.state.get(p):
                self._bring(self._deferred.groups.get(p))
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
        for number in {self._deferred.groups.get(p) for p in moved} - {None}:
            self._bring(number)
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

    def _stays(self, p: Tensor, group: Mapping[str, Any]) -> bool:
        return p in self._on_device and p.is_contiguous() and self._wants(p, group) != 32

    def _named(self) -> Iterable[Work]:
        number = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                yield p, group, names[i] if names else f"parameter {number}"
                number += 1

    # -- states on a drive ------------------------------------------------------------------------------------------
    def use_drive(
        self,
        make: Callable[[Mapping[str, int]], Extents],
        numbers: Iterable[int],
        buffer: Callable[[int], Tensor],
        buffers: int = 4,
    ) -> None:
        """Has the states and masters of some deferred groups rest on a drive; see ``DriveStates``.

        They are on the "meta" device there: ``state_dict`` has their data. What belongs to no such group stays in RAM,
        and so does a group some of whose parameters have no gradient.

        Args:
            make, buffer, buffers: see ``DriveStates``; those of the first call count until ``leave_drive``.
            numbers: of groups that were given to ``defer``; they replace earlier ones, and those among them stay.
        """
        self._deferred.wait()
        widths, layers = self.widths(), {}
        for number in numbers:
            members = [p for p in self._deferred.members[number] if p in widths and p.numel()]
            layers[number] = layer_of([states.shape_of(p.numel(), *widths[p]) for p in members])
        if self._drive is None:
            self._drive = DriveStates(make, buffer, buffers)
        for number in self._deferred.members:
            if number not in layers:
                self._bring(number)
        for number, members in self._deferred.members.items():
            if number in layers and any(widths.get(p, (0, None))[1] == 32 for p in members):
                raise ValueError(
                    "the 32-bit master of a 16-bit weight is the memory that a step works in, and cannot rest on a "
                    "drive: write master_bits=24 (or 16)"
                )
        self._drive.take_in(layers)

    @property
    def uses_drive(self) -> bool:
        """Whether states may rest on a drive."""
        return self._drive is not None

    def _of_group(self, number: int) -> dict[Tensor, states.State]:
        """The states of a group, by parameter; of those that have one."""
        return {p: self.state[p] for p in self._deferred.members.get(number, ()) if self.state.get(p)}

    def _rests(self, number: int | None) -> bool:
        return self._drive is not None and number is not None and self._drive.holds(number, self._of_group(number))

    def _bring(self, number: int | None) -> None:
        if self._drive is not None and number is not None and number in self._drive:
            self._deferred.wait(number)
            self._drive.bring(number, self._of_group(number))

    def leave_drive(self) -> None:
        """Has all states be in RAM again, and gives the drive's space back."""
        self._deferred.wait()
        if self._drive is not None:
            for number in self._deferred.members:
                self._bring(number)
            drive, self._drive = self._drive, None
            drive.end()

    def _goes_to_drive(self, p: Tensor) -> bool:
        return self._drive is not None and self._deferred.groups.get(p, -1) in self._drive

    def _put_what_was_loaded(self) -> None:
        """Writes states of a checkpoint, which may be in its file so far, one group after another."""
        for number in self._deferred.members:
            states = self._of_group(number)
            if self._drive is None or number not in self._drive or self._drive.put(number, states):
                continue
            for state in states.values():  # other states than there is room for
                state.update({key: x.clone() for key, x in tensors_of(state).items()})

    def _prepare(self, work: list[Work]) -> None:
        """Makes states and homes that do not exist yet, and takes weights anew that somebody else has written.

        Group by group where states rest on a drive, so that no more than one group's are in RAM.
        """
        if self._drive is None:
            self._prepare_in_ram(work)
            return
        items = {item[0]: item for item in work}
        for number, params in grouped(items, self._deferred.groups).items():
            these = [items[p] for p in params]
            if self._rests(number) and all(self._is_current(p, group) for p, group, _ in these):
                continue
            self._bring(number)
            self._prepare_in_ram(these)
            if number is not None and number in self._drive:
                self._drive.put(number, self._of_group(number))

    def _is_current(self, p: Tensor, group: Mapping[str, Any]) -> bool:
        if p in self._codes:
            return self.state[p].get("codes") is self._codes.codes[p][0]
        return self._host.homes.is_current(p, self.state[p], self._wants(p, group))

    def _prepare_in_ram(self, work: list[Work]) -> None:
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

    def _make_states(self, work: list[Work]) -> None:
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
                saved, copy = state_dict["state"][key], not self._goes_to_drive(p)
                loaded[p] = states.load_state(saved, p.numel(), bits, master, number, name, copy)
                if p in self._codes:
                    loaded[p] = with_codes(loaded[p], saved, self._codes.codes[p], name)
        self.param_groups = groups
        if self._drive is not None:
            self._drive.forget()
        self.state.clear()
        self.state.update(loaded)
        self._host.stagings.close()
        self._reset_runtime()
        self.use_codes(self._codes.codes)
        self._put_what_was_loaded()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer.state_dict."""
        self._deferred.wait()
        saved = super().state_dict()
        ids, found = [i for group in saved["param_groups"] for i in group["params"]], self._states_with_data()
        states_of = {key: found[p] for key, (p, *_) in zip(ids, self._named(), strict=True) if p in found}
        return {**saved, "state": {key: state_in_ram(states_of[key]) for key in saved["state"]}}

    def _states_with_data(self) -> dict[Tensor, states.State]:
        """All states; what rests on a drive can be read, and not written."""
        if self._drive is None:
            return dict(self.state)
        found = dict(self.state)
        self._drive.synchronize()
        for number in self._deferred.members:
            there = self._drive.with_data(number, self._of_group(number), self._drive.seen)
            found |= {p: {**found[p], **tensors} for p, tensors in there.items()}
        return found

    def nbytes(self) -> dict[str, int]:
        """What it holds so far: number of ``parameters``, bytes of their ``states`` and ``master``."""
        return states.held(self.state)
