"""``LowBitAdamW``: AdamW whose states rest in host RAM in few bits and are updated there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import codec
from . import state as states
from .kernels import native
from .kernels.adam import AdamConstants, AdamTensor
from .memory import PinnedArena
from .rules import DTYPES, SMALLEST_LOW_BIT, check_group, param_bits
from .staging import Staging

__all__ = ["LowBitAdamW", "param_bits"]
FORMAT = 1  # of the state dict


@dataclass
class _Home:
    """Where the kernel finds a parameter's weight between two steps: the parameter itself, or its copy in RAM.

    Attributes:
        weight: the flat weight that the kernel reads and writes.
        copy: flat 16-bit copy that it writes beside an fp32 master, or None.
        seen: (address, version) of the parameter after our last write. Another one means that somebody else wrote.
    """

    weight: Tensor
    copy: Tensor | None
    seen: tuple[int, int] | None


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with 4-, 8- or 32-bit states in host RAM, for parameters in RAM or on a GPU.

    Bytes a parameter, bf16 weights, default recipe: states 1.06 (fp32 AdamW: 8), master 1 (4), so 2.06 beside the
    weight and its gradient. Caveat of each saving: 4-bit states are rounded stochastically, so a run depends on `seed`;
    a 24-bit master holds 8 bits less than an fp32 one; `master_bits=16` has none, and rounds the weight stochastically.

    A parameter on a GPU has its weight a second time in pinned RAM (2 bytes in bf16). Its gradient comes down on a
    side stream, already during backward as far as `staging_bytes` reach, and its new weight goes up while others are
    updated.

    Parameters of fewer than 4,096 values keep fp32 states; `param_bits` gives the rule for others.

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
        skipped_blocks: blocks left as they were in steps that were done all the same.

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
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}: at least 1, or None for the physical cores less one.")
        if staging_bytes < 1:
            raise ValueError(f"staging_bytes is {staging_bytes}: at least 1 (two slots are kept in any case).")
        self.threads = threads
        self.seed = int(seed)
        self.staging_bytes = int(staging_bytes)
        self.check_finite = check_finite
        self.max_skipped_steps = max_skipped_steps
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.skipped_blocks = 0
        self._param_bits = dict(param_bits or {})
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
        self._homes: dict[Tensor, _Home] = {}
        self._arenas: list[PinnedArena] = []
        self._stagings: dict[torch.device, tuple[frozenset[int], Staging]] = {}
        self._grad_scale = 1.0
        self._grads_finite: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_homes", "_arenas", "_stagings", "_grad_scale", "_grads_finite"}
        # A scheduler puts its wrapper of `step` into the instance: it is bound to this one, so it stays here too.
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in left_out and not key.endswith("_hooks") and not callable(value)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
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

    # -- the step ---------------------------------------------------------------------------------------------------
    def scale_gradients(self, scale: float, finite: bool = True) -> None:
        """Says what the next step's gradients are to be multiplied with: the clipping factor, without a pass over them.

        Args:
            scale: the factor; it holds for one step.
            finite: whether all gradients are finite, which whoever took their norm knows. False: the next step is
                skipped.
        """
        self._grad_scale, self._grads_finite = float(scale), bool(finite)

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
        work = self._with_gradient()
        if finite is None and self.check_finite:
            finite = _all_finite([p.grad for p, _, _ in work if p.grad is not None], self.threads)
        if finite is False:
            self._skip()
            return loss
        self.skipped_in_a_row = 0
        self._prepare(work)
        on_host = [item for item in work if item[0].device.type == "cpu"]
        skipped = self._step_host(on_host, scale)
        for device in {p.device for p, _, _ in work if p.device.type != "cpu"}:
            skipped += self._step_device(device, [item for item in work if item[0].device == device], scale)
        for p, _, _ in work:
            self.state[p]["step"] += 1
        self.skipped_blocks += skipped
        return loss

    def synchronize(self) -> None:
        """Returns when every weight that a step has written is where its parameter is."""
        for device in self._stagings:
            torch.cuda.synchronize(device)

    def _with_gradient(self) -> list[tuple[Tensor, dict[str, Any], str]]:
        """(parameter, group, name) of all that have a gradient, each one checked."""
        work = []
        for p, group, name in self._named():
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {name}, shape {tuple(p.shape)}, is sparse ({p.grad.layout}): LowBitAdamW takes "
                    "dense gradients only. Build the embedding with sparse=False."
                )
            if p.grad.dtype not in DTYPES:
                raise TypeError(f"the gradient of {name} is {p.grad.dtype}; float32, bfloat16 and float16 are taken.")
            if p.device.type not in ("cpu", "cuda"):
                raise TypeError(f"{name} is on {p.device}; parameters may be on the CPU or on a CUDA GPU.")
            if p.device.type == "cuda" and (p.grad.dtype is not p.dtype or p.grad.device != p.device):
                raise TypeError(
                    f"{name} is {p.dtype} on {p.device} and its gradient {p.grad.dtype} on {p.grad.device}; on a GPU "
                    "both must be of one dtype and on one device."
                )
            if p.numel():
                work.append((p, group, name))
        return work

    def _named(self) -> Iterable[tuple[Tensor, dict[str, Any], str]]:
        number = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                yield p, group, names[i] if names else f"parameter {number}"
                number += 1

    def _skip(self) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        for _, staging in self._stagings.values():
            staging.drop()
        limit = self.max_skipped_steps
        if limit is not None and self.skipped_in_a_row >= limit:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} steps in a row had gradients that were not finite and were skipped; the "
                "weights are those of the last whole step. Lower the learning rate, look for bad samples, or raise "
                "max_skipped_steps."
            )

    def _step_host(self, work: list[tuple[Tensor, dict[str, Any], str]], scale: float) -> int:
        tensors = []
        for p, group, _ in work:
            assert p.grad is not None
            tensors.append(self._tensor(p, group, 0, p.numel(), p.grad.detach().contiguous().view(-1), scale))
        skipped = native.adam_step(tensors, self.threads) if tensors else 0
        for p, _, _ in work:
            home = self._homes[p]
            target = home.weight if home.copy is None else home.copy
            if target.data_ptr() != p.data_ptr():  # a parameter that is not contiguous
                p.copy_(target.view(p.shape))
            else:
                torch.autograd.graph.increment_version(p)
            home.seen = _mark(p)
        return skipped

    def _step_device(self, device: torch.device, work: list[tuple[Tensor, dict[str, Any], str]], scale: float) -> int:
        groups = {p: group for p, group, _ in work}

        def tensor_of(p: Tensor, start: int, stop: int, grad: Tensor) -> AdamTensor:
            return self._tensor(p, groups[p], start, stop, grad, scale)

        def home_of(p: Tensor) -> Tensor:
            home = self._homes[p]
            return home.weight if home.copy is None else home.copy

        with torch.cuda.device(device):
            skipped = self._staging(device).step(
                groups, tensor_of, lambda tensors: native.adam_step(tensors, self.threads), home_of
            )
        for p in groups:
            self._homes[p].seen = _mark(p)
        return skipped

    def _tensor(
        self, p: Tensor, group: dict[str, Any], start: int, stop: int, grad: Tensor, scale: float
    ) -> AdamTensor:
        """The kernel's view of values ``[start, stop)`` of a parameter."""
        state, home = self.state[p], self._homes[p]
        bits, step = state["bits"], state["step"] + 1
        beta1, beta2 = group["betas"]
        whole = AdamTensor(
            weight=home.weight,
            grad=grad,
            m=state["m"],
            v=state["v"],
            m_scale=state.get("m_scale"),
            v_scale=state.get("v_scale"),
            bits=bits,
            constants=AdamConstants.of(
                bits,
                step,
                float(group["lr"]),
                float(beta1),
                float(beta2),
                float(group["eps"]),
                float(group["weight_decay"]),
                scale,
            ),
            key=codec.tensor_key(self.seed, step, state["index"]),
            extension=state.get("extension"),
            copy=home.copy,
        )
        return whole if stop - start == p.numel() else whole.part(start, stop)

    # -- what a parameter needs before its step ---------------------------------------------------------------------
    def _prepare(self, work: list[tuple[Tensor, dict[str, Any], str]]) -> None:
        """Makes states and homes that do not exist yet, and takes weights anew that somebody else has written."""
        numbers = {p: i for i, (p, _, _) in enumerate(self._named())}
        fresh = []
        for p, group, _ in work:
            if not self.state[p]:
                self.state[p] = states.new_state(p.numel(), self._bits(p, group), numbers[p])
            home = self._homes.get(p)
            if home is None:
                fresh.append((p, group))
            elif home.seen != _mark(p) or home.weight.dtype is not self._home_dtype(p, group):
                self._take_weight(p, group, home, keep_master=False)
        on_device = [p for p, _ in fresh if p.device.type != "cpu"]
        pinned = dict(zip(on_device, self._pinned(on_device), strict=True))
        for p, group in fresh:
            home = _Home(torch.empty(0), pinned.get(p), None)
            self._take_weight(p, group, home, keep_master=True)
            self._homes[p] = home

    def _bits(self, p: Tensor, group: Mapping[str, Any]) -> int:
        return 32 if p.numel() < SMALLEST_LOW_BIT else self._param_bits.get(p, group["state_bits"])

    def _home_dtype(self, p: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        return torch.float32 if group["master_bits"] == 32 else p.dtype

    def _pinned(self, params: list[Tensor]) -> list[Tensor]:
        """A flat pinned tensor for each parameter, of its size and dtype."""
        if not params:
            return []
        arena = PinnedArena([p.numel() * p.element_size() for p in params])
        self._arenas.append(arena)
        return [part.view(p.dtype) for part, p in zip(arena.parts, params, strict=True)]

    def _take_weight(self, p: Tensor, group: Mapping[str, Any], home: _Home, keep_master: bool) -> None:
        """Reads a parameter's weight into its home and makes its master fit it.

        Args:
            keep_master: trust the state's master: it was loaded together with the weight, or does not exist yet. False
                after somebody has written the weight: the master starts at the new weight.
        """
        state = self.state[p]
        if p.device.type == "cpu":
            flat = p.detach().contiguous().view(-1)
            resident = flat
        else:
            resident = home.copy if home.copy is not None else home.weight
            resident.copy_(p.detach().reshape(-1))
        wanted = 32 if p.dtype is torch.float32 else group["master_bits"]
        extension, master = state.pop("extension", None), state.pop("master", None)
        home.weight, home.copy = resident, None
        if p.dtype is not torch.float32 and wanted == 24:
            kept = keep_master and extension is not None
            state["extension"] = extension if kept else torch.zeros(p.numel(), dtype=torch.int8)
        elif p.dtype is not torch.float32 and wanted == 32:
            if keep_master and extension is not None:
                master = codec.join_master(resident, extension)
            elif not keep_master or master is None:
                master = resident.float()
            state["master"] = home.weight = master
            home.copy = resident
        home.seen = _mark(p)

    def _staging(self, device: torch.device) -> Staging:
        params = [p for p in self._homes_in_order() if p.device == device]
        ids = frozenset(id(p) for p in params)
        known = self._stagings.get(device)
        if known is not None and known[0] == ids:
            return known[1]
        if known is not None:
            known[1].close()
        staging = Staging(device, params, self.staging_bytes)
        self._stagings[device] = (ids, staging)
        return staging

    def _homes_in_order(self) -> list[Tensor]:
        return [p for p, _, _ in self._named() if p in self._homes]

    # -- saving, loading, counting ----------------------------------------------------------------------------------
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, of this class or of torch.optim.AdamW, into memory of our own.

        States of fewer bits are widened (4 to 8 to 32, a 24-bit master to 32); the widths of this optimizer stay. The
        weights are read at the next step, so it does not matter whether the model is loaded before or after.

        Raises:
            ValueError: groups or parameters that do not match, a damaged state, or one of more bits than this
                optimizer has. Nothing has changed then.
        """
        saved_groups = state_dict["param_groups"]
        saved = [len(g["params"]) for g in saved_groups]
        own = [len(g["params"]) for g in self.param_groups]
        if saved != own:
            raise ValueError(
                f"the saved optimizer has parameter groups of {saved} parameters, this one of {own}: they belong to "
                "different models, or other parameters were frozen."
            )
        ids = [i for g in saved_groups for i in g["params"]]
        loaded: dict[Tensor, states.State] = {}
        for number, (key, (p, group, name)) in enumerate(zip(ids, self._named(), strict=True)):
            if state_dict["state"].get(key):
                master = None if p.dtype is torch.float32 else group["master_bits"]
                bits = self._bits(p, group)
                loaded[p] = states.load_state(state_dict["state"][key], p.numel(), bits, master, number, name)
        widths = [(g["state_bits"], g["master_bits"]) for g in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": saved_groups})
        for group, (state_bits, master_bits) in zip(self.param_groups, widths, strict=True):
            group["state_bits"], group["master_bits"], group["format"] = state_bits, master_bits, FORMAT
        self.state.clear()
        self.state.update(loaded)
        for _, staging in self._stagings.values():
            staging.close()
        self._reset_runtime()

    def nbytes(self) -> dict[str, int]:
        """What the optimizer holds so far: number of ``parameters``, bytes of their ``states`` and ``master``."""
        total = {"parameters": 0, "states": 0, "master": 0}
        for p, state in self.state.items():
            if state:
                moments, master = states.nbytes(state)
                total["parameters"] += p.numel()
                total["states"] += moments
                total["master"] += master
        return total


def _all_finite(grads: list[Tensor], threads: int | None) -> bool:
    """Whether all values are finite, with one read of each gradient and one wait for each GPU.

    On a GPU a sum is taken, which is finite only if all its terms are; where huge terms made it overflow, a second look
    decides.
    """
    if not native.all_finite([g.detach().contiguous() for g in grads if g.device.type == "cpu"], threads):
        return False
    on_device = [g.detach() for g in grads if g.device.type != "cpu"]
    sums: dict[torch.device, list[Tensor]] = {}
    for grad in on_device:
        sums.setdefault(grad.device, []).append(grad.sum().float())
    if all(bool(torch.stack(found).isfinite().all()) for found in sums.values()):
        return True
    return all(bool(grad.isfinite().all()) for grad in on_device)


def _mark(p: Tensor) -> tuple[int, int]:
    return p.data_ptr(), p._version
