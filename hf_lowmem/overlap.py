"""Where the streamer and the optimizer meet: updates under the next forward, norms, and who has to wait for them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback

from .buffers import aligned
from .optim import LowBitAdamW
from .plan import PASSING_STATES, Footprint, Rest, footprint
from .resident import kinds_of, why_not
from .store import Store
from .stream import Streamer


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def total_norm(params: Sequence[nn.Parameter], streamer: Streamer | None) -> Tensor:
    """torch.nn.utils.get_total_norm of the parameters' gradients, with what the streamer has measured on their way."""
    norms: dict[nn.Parameter, Tensor] = {} if streamer is None else dict(streamer.early_norms)
    grads = {p: p.grad for p in params if p.grad is not None and p not in norms}
    if streamer is not None:
        for p in grads:
            norm = streamer.gradient_norm(p)
            if norm is not None:
                norms[p] = norm
    if not norms:
        return torch.nn.utils.get_total_norm(list(grads.values()))
    first = next(iter(norms.values())).device
    for device in {grad.device for p, grad in grads.items() if p not in norms}:
        here = [p for p, grad in grads.items() if p not in norms and grad.device == device]
        norms.update(zip(here, torch._foreach_norm([grads[p] for p in here]), strict=True))
    measured = [p for p in params if p in norms]
    dtypes = list(dict.fromkeys(p.dtype for p in measured))
    in_order = sorted(measured, key=lambda p: dtypes.index(p.dtype))  # that in which torch adds them up, dtype by dtype
    return torch.linalg.vector_norm(torch.stack([norms[p].to(first) for p in in_order]))


class NormAhead:
    """The global norm of a model's gradients, begun on the device while the CPU is still busy with other things.

    Args:
        params: all of the model's parameters.
        streamer: of the model, if it has one.
    """

    def __init__(self, params: Sequence[nn.Parameter], streamer: Streamer | None) -> None:
        self._norm = total_norm(params, streamer)
        self._seen = [(p, p.grad, None if p.grad is None else p.grad._version) for p in params]

    def of(self, params: Sequence[nn.Parameter]) -> Tensor | None:
        """The norm, unless gradients are others now, or have been written."""
        if len(params) != len(self._seen):
            return None
        for p, (q, grad, version) in zip(params, self._seen, strict=True):
            if p is not q or p.grad is not grad or (grad is not None and grad._version != version):
                return None
        return self._norm


def overlap(streamer: Streamer, optimizer: Any, travels: bool | None = None) -> bool:
    """Lets the optimizer update streamed blocks under the next forward, one after another, and the rest on the GPU.

    To be called again when blocks have moved.

    Args:
        streamer: of the model.
        optimizer: a ``LowBitAdamW``, or Accelerate's wrapper of one.
        travels: whether the device may update a streamed block that it needs before the CPU has come to it. None: if it
            is a GPU that can.

    Returns: whether the rest is updated on the GPU.
    """
    optimizer = unwrapped(optimizer)
    device = streamer.link.device
    if travels is None:
        streamed = {p for block in streamer.blocks for _, p in block.params}
        widths = {p: width for p, width in optimizer.widths().items() if p in streamed}
        travels = device.type == "cuda" and why_not(device, kinds_of(widths)) is None
    coded = any(block.forms for block in streamer.blocks)
    # Where weights cross the link in few bits beside those at home, they are not the ones that are updated.
    travels = travels and all(block.bare for block in streamer.blocks if block.forms)
    at_once = streamer.ahead + 1 if travels else 0
    groups = [[] if block.kept else [p for _, p in block.params] for block in streamer.blocks]
    optimizer.defer(groups, at_once, partial(streamer.encode, threads=optimizer.threads) if coded else None)
    optimizer.use_codes(streamer.codes())
    streamer.updates = optimizer
    return keep_on_device(optimizer)


def rest_on_drives(
    streamer: Streamer,
    optimizer: LowBitAdamW,
    folders: Sequence[str],
    outside: Footprint,
    ram_budget: int,
    *,
    on_device: bool,
    gradients_rest: bool,
) -> Rest:
    """Has states and masters of streamed blocks rest on drives, as far as RAM has no room for them; after ``overlap``.

    Args:
        folders: one on each drive.
        outside: of what is not streamed.
        ram_budget: bytes.
        on_device: whether the optimizer keeps states where their parameters are.
        gradients_rest: whether gradients wait at home for the step.

    Returns: what rests there now, and of how many blocks.

    Raises: what ``Store`` does: a folder that is none, or has no room.
    """
    widths, others, numbers, homes = optimizer.widths(), Footprint(), [], []
    for block in streamer.blocks:
        size = footprint([p for _, p in block.params], widths, block.nbytes_of)
        if not block.kept:
            numbers.append(block.number)
            gradients = size.gradients if gradients_rest else 0
            homes.append(Footprint(size.weights + block.copied_bytes, size.masters, size.states, gradients))
        elif not on_device:
            others += Footprint(size.weights, size.masters, size.states)
    if not on_device and streamer.link.device.type != "cpu":
        others += Footprint(outside.weights, outside.masters, outside.states)
    rest = Rest.of(homes, others, ram_budget, True)
    if rest.blocks or optimizer.uses_drive:
        places = partial(Store, list(folders), slots=1)  # weights are in RAM, so no crash leaves a whole step anyway
        there = numbers[len(numbers) - rest.blocks :]
        optimizer.use_drive(places, there, lambda nbytes: aligned([nbytes])[0], PASSING_STATES)
    return rest


def keep_on_device(optimizer: LowBitAdamW) -> bool:
    """Keeps the states of all parameters that are on a GPU there. Returns whether that goes; it warns if not."""
    widths = {p: width for p, width in optimizer.widths().items() if p.device.type == "cuda"}
    params, kinds = list(widths), kinds_of(widths)
    reason = next(filter(None, (why_not(device, kinds) for device in {p.device for p in params})), None)
    if reason is None:
        optimizer.keep_on_device(params)
        return True
    size = sum(p.nbytes for p in params)
    warnings.warn(
        f"Triton cannot be used ({reason}): the optimizer states of what stays on the GPU ({size / 1e9:.2f} GB of "
        "weights) rest in RAM and are updated there, which costs small batches dearly. Install triton (on Windows "
        "triton-windows) and a C compiler.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))
_OURS = ("transformers.", "hf_lowmem.", "trl.", "accelerate.")  # whose methods look at no weights where others might


def is_others(cls: type, name: str) -> bool:
    """Whether a method is somebody's own, and no library's."""
    return not next(c for c in cls.__mro__ if name in vars(c)).__module__.startswith(_OURS)


class SettleCallback(TrainerCallback):
    """Waits for updates that are under way before others' callbacks look at the weights."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.proxy(trainer)

    def _settle(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer.optimizer is not None:
            unwrapped(self._trainer.optimizer).synchronize()

    def _before_step(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._before_step()
        self._settle_if_others_look("on_step_begin")

    def _settle_if_others_look(self, event: str, *args: Any, **kwargs: Any) -> None:
        looks = any(may_look(callback, event) for callback in self._trainer.callback_handler.callbacks)
        if event == "on_step_begin":  # the forward is next: code before it may read weights
            looks = looks or steps_look(self._trainer)
        if looks:
            self._settle()


def steps_look(trainer: Any) -> bool:
    """Whether what begins a step before its forward may read or write weights."""
    return bool(trainer._steps_are_others() or getattr(trainer.args, "use_vllm", False))  # TRL hands it the weights


def looked_at(trainer: Any) -> bool:
    """Whether anybody may read or write weights between two steps, other than this library and those it stands on."""
    callbacks = trainer.callback_handler.callbacks
    return steps_look(trainer) or any(may_look(callback, event) for callback in callbacks for event in EVENTS)


def may_look(callback: TrainerCallback, event: str) -> bool:
    of_trl = type(callback).__module__.startswith("trl.")  # SyncRefModelCallback reads weights
    defined = getattr(type(callback), event, None) is not getattr(TrainerCallback, event)
    return defined and (of_trl or is_others(type(callback), event))


for _event in EVENTS:
    always = _event in ("on_epoch_end", "on_evaluate", "on_predict", "on_save", "on_train_end")
    method = SettleCallback._settle if always else partialmethod(SettleCallback._settle_if_others_look, _event)
    setattr(SettleCallback, _event, method)
SettleCallback.on_step_begin = SettleCallback._before_step  # type: ignore[method-assign, assignment]
