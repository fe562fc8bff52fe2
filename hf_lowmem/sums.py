"""``StochasticSums``: gradients of several micro-batches, added in 16 bits without a bias.

torch adds them in the weights' dtype, each sum rounded to nearest: of what is small beside the sum so far, nothing may
be left, in every micro-batch. Rounded up or down with the probability that makes the mean exact, it counts on average,
and a gradient still takes two bytes.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from . import codec
from .layer import gradient_dtype

CHUNK = 1 << 22  # values that are added at one time: what that takes is a few times as many bytes
_SUMS = "_hf_lowmem_sums"  # the attribute of a model under which its sums lie
_SALT = 0x6A09E667F3BCC908  # so that the optimizer's noise, of the same seed and step, is another
_MICRO_BATCHES = 1 << 32  # keys of one step


class StochasticSums:
    """Has the gradients of a model's 16-bit weights added so, wherever they are.

    Hooks of others see each micro-batch's gradient as ever. A copy of the model, or one from a file, adds as torch
    does.

    [Note: what the hooks hang on] On the parameters: a streamed one's node in the graph is another one whenever it has
    moved. A parameter's hook is called also where ``torch.autograd.grad`` only asks for its gradient and nothing is
    added; so what was put out of the way comes back at the end of each backward, and if it fails, when autograd drops
    what it was to call there. They hold weak references alone: the garbage collector does not see a parameter's hooks.

    Args:
        model: whose parameters are about to be trained. It keeps the sums.

    Attributes:
        seed: of the rounding.
        step: number of the step whose gradients are added; with the seed it decides all random bits. None: steps are
            counted for each parameter, from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seed = 0
        self.step: int | None = None
        self._before: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # by the parameter's number
        self._counts: dict[int, tuple[int, int]] = {}  # steps, and micro-batches in this one
        self._handles = []
        me = weakref.ref(self)
        for index, p in enumerate(model.parameters()):
            if p.requires_grad and gradient_dtype(p) in (torch.bfloat16, torch.float16):
                put_away = functools.partial(_put_away, me, index, weakref.ref(p))
                put_away.__torch_unserializable__ = True  # type: ignore[attr-defined]
                add = functools.partial(_add, me, index)
                self._handles += [p.register_hook(put_away), p.register_post_accumulate_grad_hook(add)]
        vars(model)[_SUMS] = self

    def __reduce__(self) -> Any:
        return _nothing, ()

    def remove(self) -> None:
        """Takes the hooks off."""
        self.bring_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def bring_back(self) -> None:
        """Gives parameters back what was put away of their gradients and not added to."""
        for ref, before in self._before.values():
            p = ref()
            if p is not None and p.grad is None:
                p.grad = before
        self._before.clear()

    def put_away(self, index: int, ref: weakref.ref[Tensor], p: Tensor) -> None:
        """Before a gradient is accumulated: what is there already is out of its way."""
        steps, micro_batches = self._counts.get(index, (0, 0))
        if p.grad is None:
            self._counts[index] = steps + 1, 0
        elif not torch.is_grad_enabled():
            self._counts[index] = steps, micro_batches + 1
            if not self._before:
                torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(self))
            self._before[index], p.grad = (ref, p.grad), None

    def add(self, index: int, p: Tensor) -> None:
        """After it: the sum of both."""
        _, before = self._before.pop(index, (None, None))
        if before is None or p.grad is None:
            return
        steps, micro_batches = self._counts[index]
        step = (steps if self.step is None else self.step) * _MICRO_BATCHES + micro_batches
        p.grad = add_stochastic(before, p.grad, codec.tensor_key(self.seed ^ _SALT, step, index))


class _AtEnd:
    """Called when a backward is over, and dropped, called or not."""

    def __init__(self, sums: StochasticSums) -> None:
        self._sums = weakref.ref(sums)

    def __call__(self) -> None:
        sums = self._sums()
        if sums is not None:
            sums.bring_back()

    __del__ = __call__


def _put_away(sums: weakref.ref[StochasticSums], index: int, ref: weakref.ref[Tensor], gradient: Tensor) -> None:
    found, p = sums(), ref()
    if found is not None and p is not None:
        found.put_away(index, ref, p)


def _add(sums: weakref.ref[StochasticSums], index: int, p: Tensor) -> None:
    found = sums()
    if found is not None:
        found.add(index, p)


def _nothing() -> None:
    return None


def sums_of(model: nn.Module) -> StochasticSums | None:
    """The sums of a model, or of one within it."""
    found = (vars(module).get(_SUMS) for module in model.modules())
    return next((sums for sums in found if sums is not None), None)


def add_stochastically(model: nn.Module) -> None:
    """Has the gradients of 16-bit weights added so, unless that is done or they are in fp32."""
    wide = all(gradient_dtype(p) is torch.float32 for p in model.parameters() if p.requires_grad)
    if sums_of(model) is None and not wide:
        StochasticSums(model)


def forget_sums(model: nn.Module) -> None:
    """Has a model's gradients added as torch adds them again."""
    for module in model.modules():
        sums = vars(module).pop(_SUMS, None)
        if sums is not None:
            sums.remove()


@torch.no_grad()
def add_stochastic(total: Tensor, gradient: Tensor, key: int) -> Tensor:
    """``total + gradient``, computed in fp32 and rounded stochastically to their dtype.

    Args:
        total, gradient: of one shape, bf16 or fp16.
        key: of the random bits, ``codec.tensor_key``: equal bits on every device.
    """
    out = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    flat, ways = out.view(-1), (total.reshape(-1), gradient.reshape(-1))
    for start in range(0, flat.numel(), CHUNK):
        exact = ways[0][start : start + CHUNK].float() + ways[1][start : start + CHUNK].float()
        blocks = -(-exact.numel() // (2 * codec.HALF))
        noise = codec.Noise(key, blocks, out.device, first=start // (2 * codec.HALF))
        words = noise.weight_words(2).view(-1)[: exact.numel()]
        rounded = codec.round_stochastic(exact, out.dtype, words)
        # An inf or NaN must stay one: gradient scaling and skipped steps depend on it.
        flat[start : start + CHUNK] = torch.where(exact.isfinite(), rounded, exact.to(out.dtype))
    return out
