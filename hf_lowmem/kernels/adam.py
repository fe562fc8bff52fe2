"""One AdamW step of one tensor, in plain torch: the definition that every engine equals bit for bit.

The arithmetic, in fp32, each line rounded once (``fma`` rounds product and sum together)::

    m   = fma(c_m, g, b_m * m_scale * m_code)          g is the gradient as it lies there, its scale folded into c_m
    h   = c_h * g
    v   = fma(h, h, (b_v * v_scale)**2 * root_code**2)
    u   = sqrt(v)
    w   = fma(-lr / (1 - beta1**t), m / fma(u, 1 / sqrt(1 - beta2**t), eps), w * (1 - lr * weight_decay))

which is torch.optim.AdamW's update (Loshchilov and Hutter 2019, algorithm 2) with sqrt(v) taken once. Then m and u are
encoded again (``codec``), w goes back to its weight and master, and the weight's 16-bit copy is written where one is
asked for.

A block that holds a gradient which is not finite, or whose scaled magnitude exceeds 1e19 (its square would leave fp32),
is left as it was, weights and states, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import codec

LARGEST_GRADIENT = 1e19
CHUNK = 1 << 16  # values that the torch engine treats at a time: its temporaries stay in the cache


@dataclass(frozen=True)
class AdamConstants:
    """What one tensor's step needs of the hyperparameters, each a number that fp32 holds after one rounding.

    Args of ``of``:
        bits: width of the states, 4, 8 or 32.
        step: number of this step, from 1.
        grad_scale: what the gradient is to be multiplied with (clipping, loss scaling).
    """

    c_m: float
    b_m: float
    c_h: float
    b_v: float
    root_correction: float
    eps: float
    step_size: float
    decay: float
    grad_scale: float

    @classmethod
    @lru_cache(maxsize=1024)  # the parameters of a group share them
    def of(
        cls,
        bits: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_scale: float = 1.0,
    ) -> AdamConstants:
        state = codec.STATES.get(bits)
        return cls(
            c_m=(1.0 - beta1) * grad_scale,
            b_m=beta1 / codec.LEVELS if state else beta1,
            c_h=math.sqrt(1.0 - beta2) * grad_scale,
            b_v=math.sqrt(beta2) / state.top if state else beta2,
            root_correction=1.0 / math.sqrt(1.0 - beta2**step),
            eps=eps,
            step_size=-lr / (1.0 - beta1**step),
            decay=1.0 - lr * weight_decay,
            grad_scale=grad_scale,
        )

    def grad_limit(self, dtype: torch.dtype) -> int:
        """Magnitude bits of the largest gradient of ``dtype`` that a block may hold."""
        largest = torch.finfo(dtype).max
        scale = abs(self.grad_scale)
        limit = min(LARGEST_GRADIENT / scale, largest) if scale > 0 else largest
        word = torch.tensor(limit, dtype=torch.float64).to(dtype)
        return int(word.view(torch.int32 if dtype is torch.float32 else torch.int16).item())


@dataclass
class AdamTensor:
    """The buffers of one tensor of ``n`` values, flat and contiguous, all on one device.

    Args:
        weight: ``[n]`` float32, bfloat16 or float16; read and written.
        grad: ``[n]`` of one of the same types; read.
        m, v: codes ``uint8[codec.nbytes(n)]``, or ``float32[n]`` with 32-bit states; read and written.
        m_scale, v_scale: ``float32[blocks]``; None with 32-bit states.
        extension: ``int8[n]`` of a 24-bit master; read and written. None: a 16-bit weight is rounded stochastically.
        copy: ``[n]`` bfloat16 or float16, written with an fp32 ``weight`` rounded to nearest.
        bits: 4, 8 or 32.
        key: of the random bits, ``codec.tensor_key``.
        start: number of the first value here within the whole parameter, a multiple of 256: it numbers the random bits.
    """

    weight: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor
    m_scale: Tensor | None
    v_scale: Tensor | None
    bits: int
    constants: AdamConstants
    key: int = 0
    extension: Tensor | None = None
    copy: Tensor | None = None
    start: int = 0

    def part(self, start: int, stop: int) -> AdamTensor:
        """The same step of values ``[start, stop)``; the gradient is the part's already. `start` is that of a block."""
        form, values = codec.STATES.get(self.bits), slice(start, stop)
        codes = slice(form.nbytes(start), form.nbytes(start) + form.nbytes(stop - start)) if form else values
        blocks = slice(start // form.block, form.blocks(stop)) if form else values
        return replace(
            self,
            weight=self.weight[values],
            m=self.m[codes],
            v=self.v[codes],
            m_scale=None if self.m_scale is None else self.m_scale[blocks],
            v_scale=None if self.v_scale is None else self.v_scale[blocks],
            extension=None if self.extension is None else self.extension[values],
            copy=None if self.copy is None else self.copy[values],
            start=self.start + start,
        )


def state_tensor(
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    seed: int,
    weight: Tensor,
    grad: Tensor,
    scale: float,
    step: int,
    copy: Tensor | None = None,
) -> AdamTensor:
    """A whole parameter's step, from its optimizer state (``state.py``) and its parameter group.

    Args:
        seed: of the optimizer.
        scale: what the gradient is to be multiplied with.
        step: number of this step, from 1.
    """
    bits = state["bits"]
    beta1, beta2 = group["betas"]
    hyper = float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"])
    return AdamTensor(
        weight=weight,
        grad=grad,
        m=state["m"],
        v=state["v"],
        m_scale=state.get("m_scale"),
        v_scale=state.get("v_scale"),
        bits=bits,
        constants=AdamConstants.of(bits, step, *hyper, scale),
        key=codec.tensor_key(seed, step, state["index"]),
        extension=state.get("extension"),
        copy=copy,
    )


def adam_step(tensors: Sequence[AdamTensor]) -> int:
    """Does one step of every tensor and returns the number of blocks left out for their gradients."""
    with torch.no_grad():
        return sum(_tensor_step(t) for t in tensors)


def _tensor_step(t: AdamTensor) -> int:
    n = t.weight.numel()
    skipped = 0
    for start in range(0, n, CHUNK):
        skipped += _chunk_step(t, start, min(CHUNK, n - start))
    return skipped


def _chunk_step(t: AdamTensor, start: int, n: int) -> int:
    state = codec.STATES.get(t.bits)
    block = state.block if state else codec.BLOCK32
    part = slice(start, start + n)
    blocks = slice(start // block, -(-(start + n) // block))
    grad, weight = t.grad[part], t.weight[part]
    bad = _blocks_over(grad, t.constants.grad_limit(grad.dtype), block)
    stays = bad[:, None].expand(-1, block)
    noise = codec.Noise(t.key, len(bad), grad.device, first=t.start // block + blocks.start)
    stochastic = weight.dtype is not torch.float32 and t.extension is None
    words = noise.weight_words(block // codec.HALF) if stochastic else None
    m_noise, v_noise, w_noise = noise.rounding_bytes(block // codec.HALF)
    if t.extension is not None:
        words = w_noise

    m, v = _moments(t, part, blocks, codec.as_blocks(grad.float(), block))
    root = v.double().sqrt().float()  # torch's fp32 sqrt may be off by one in the last place, its fp64 one does no harm
    k = t.constants
    old = _read_weight(t, part)
    ratio = m / codec.fma(_f32(k.root_correction), root, _like(root, k.eps))
    new = codec.fma(_f32(k.step_size), ratio.flatten()[:n], old * _f32(k.decay))

    keep = stays.reshape(-1)[:n]
    _write_weight(t, part, new, keep, None if words is None else words.flatten()[:n])
    if state is None:
        t.m[part] = torch.where(keep, t.m[part], m.flatten()[:n])
        t.v[part] = torch.where(keep, t.v[part], v.flatten()[:n])
        return int(bad.sum())
    assert t.m_scale is not None
    assert t.v_scale is not None
    m_dither, v_dither = noise.dithers()
    for data, scales, (codes, scale) in (
        (t.m, t.m_scale, state.encode_m(m, m_noise, n, m_dither)),
        (t.v, t.v_scale, state.encode_root(root, v_noise, n, v_dither)),
    ):
        where = slice(state.nbytes(start), state.nbytes(start) + len(codes))
        width = 1 if t.bits == 8 else 2
        frozen = stays[:, : block // width].reshape(-1)[: len(codes)]
        data[where] = torch.where(frozen, data[where], codes)
        scales[blocks] = torch.where(bad, scales[blocks], scale)
    return int(bad.sum())


def _moments(t: AdamTensor, part: slice, blocks: slice, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments of this step, ``float32[blocks, block]``."""
    k, n = t.constants, part.stop - part.start
    state = codec.STATES.get(t.bits)
    if state is None:
        old_m = codec.as_blocks(t.m[part], codec.BLOCK32) * _f32(k.b_m)
        old_v = codec.as_blocks(t.v[part], codec.BLOCK32) * _f32(k.b_v)
    else:
        assert t.m_scale is not None
        assert t.v_scale is not None
        where = slice(state.nbytes(part.start), state.nbytes(part.start) + state.nbytes(n))
        m_unit = t.m_scale[blocks] * _f32(k.b_m)
        root_unit = t.v_scale[blocks] * _f32(k.b_v)
        root = state.decode_root(t.v[where], n)
        old_m = state.decode_m(t.m[where], n) * m_unit[:, None]
        old_v = root * root * (root_unit * root_unit)[:, None]
    h = grad * _f32(k.c_h)
    return codec.fma(_f32(k.c_m), grad, old_m), codec.fma(h, h, old_v)


def _read_weight(t: AdamTensor, part: slice) -> Tensor:
    if t.extension is not None:
        return codec.join_master(t.weight[part], t.extension[part])
    return t.weight[part].float()


def _write_weight(t: AdamTensor, part: slice, new: Tensor, keep: Tensor, words: Tensor | None) -> None:
    weight = t.weight[part]
    if t.extension is not None:
        assert words is not None
        value, extension = codec.split_master(new, weight.dtype, words)
        t.extension[part] = torch.where(keep, t.extension[part], extension)
    elif words is not None:
        value = codec.round_stochastic(new, weight.dtype, words)
    else:
        value = new
    weight.copy_(torch.where(keep, weight, value))
    if t.copy is not None:
        t.copy[part] = weight.to(t.copy.dtype)


def _blocks_over(grad: Tensor, limit: int, block: int) -> Tensor:
    """Which blocks hold a gradient whose magnitude bits exceed ``limit``, ``bool[blocks]``."""
    if grad.dtype is torch.float32:
        magnitude = grad.view(torch.int32) & 0x7FFFFFFF
    else:
        magnitude = grad.view(torch.int16) & 0x7FFF
    return codec.as_blocks(magnitude, block).amax(1) > limit


def _f32(x: float) -> float:
    """The Python float nearest to ``x`` that fp32 holds: torch multiplies fp32 by it without a second rounding."""
    return torch.tensor(x, dtype=torch.float32).item()


def _like(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x, _f32(value))
