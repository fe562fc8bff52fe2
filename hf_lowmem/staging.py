"""Gradients down, weights up: how the step of parameters on a GPU is fed from, and written back to, host RAM.

Parameters are cut into pieces, and pieces gathered into batches of about ``PIECE`` values, last parameter first (the
order in which backward makes gradients). A batch's gradients come down into one of a bounded number of pinned slots,
on a copy stream of their own; while batch i is updated by the CPU, the gradients of those behind it come down and the
weights of those before it go up.

Gradients start down while backward still runs, as far as the slots reach. A gradient that is changed afterwards (the
next micro-batch, clipping in place) is fetched again. Its version alone does not tell: a GradScaler's unscaling, a
collective and whatever writes through ``.data`` leave it as it was. So the sum of all its bits is compared too, on the
GPU. Where early copies turn out wasted in several steps, they are given up.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import codec
from .kernels import native
from .kernels.adam import AdamTensor
from .memory import PinnedArena

PIECE = 2**23  # values; 1 ms of work for a fast host, large enough to hide a Python call
ALIGN = 256  # a piece starts where a block starts, at every width of the states
MISSES_ALLOWED = 2


class _Seen(NamedTuple):
    """A gradient as it was when it started down; `total` is the sum of its bits, on the GPU."""

    address: int
    version: int
    total: Tensor


@dataclass(eq=False)
class Piece:
    """Values ``[start, stop)`` of one parameter, and where in its batch's slot their gradient lies."""

    param: Tensor
    start: int
    stop: int
    offset: int


@dataclass(eq=False)
class Batch:
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0
    values: int = 0
    slot: Tensor | None = None

    def add(self, param: Tensor, start: int, stop: int, itemsize: int) -> Piece:
        piece = Piece(param, start, stop, self.nbytes)
        self.pieces.append(piece)
        self.nbytes += -(-(stop - start) * itemsize // ALIGN) * ALIGN
        self.values += stop - start
        return piece


def cut(params: Sequence[Tensor]) -> list[Batch]:
    """Batches of about ``PIECE`` values, last parameter first."""
    batches = [Batch()]
    for param in reversed(params):
        n = param.numel()
        for start in range(0, n, PIECE):
            stop = min(start + PIECE, n)
            if batches[-1].values and batches[-1].values + stop - start > PIECE:
                batches.append(Batch())
            batches[-1].add(param, start, stop, param.element_size())
    return batches


class Staging:
    """The pinned slots and copy streams of one GPU.

    Args:
        device: the GPU.
        params: its parameters, in the optimizer's order.
        nbytes: bound of the slots in bytes; two slots are the least.
    """

    def __init__(self, device: torch.device, params: Sequence[Tensor], nbytes: int) -> None:
        self.device = device
        self.batches = cut(params)
        self._places: dict[Tensor, list[tuple[Batch, Piece]]] = {p: [] for p in params}
        for batch in self.batches:
            for piece in batch.pieces:
                self._places[piece.param].append((batch, piece))
        slot = max(batch.nbytes for batch in self.batches)
        count = min(max(2, nbytes // slot), max(2, len(self.batches)))
        self.arena = PinnedArena([slot] * count)
        self._free = list(self.arena.parts)
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._uploaded = torch.cuda.Event()
        self._came_down: dict[Tensor, _Seen] = {}
        self._misses = 0
        self._hooks = [p.register_post_accumulate_grad_hook(_hook_of(weakref.ref(self))) for p in params]
        weakref.finalize(self, _remove, self._hooks)

    def close(self) -> None:
        """Takes the hooks off the parameters and waits for every copy, for the pinned memory may go now."""
        _remove(self._hooks)
        self._down.synchronize()
        self._up.synchronize()

    # -- down -------------------------------------------------------------------------------------------------------
    def _on_gradient(self, param: Tensor) -> None:
        if self._misses >= MISSES_ALLOWED or not self._fits(param):
            return
        complete = True
        for batch, piece in self._places[param]:
            if batch.slot is None and self._free:
                batch.slot = self._free.pop()
            if batch.slot is None:
                complete = False
            else:
                self._fetch(batch, piece)
        if complete:
            self._came_down[param] = _Seen(*_mark(param), _total(param))

    def _fits(self, param: Tensor) -> bool:
        grad = param.grad
        return (
            grad is not None
            and not grad.is_sparse
            and grad.dtype is param.dtype
            and grad.device == param.device == self.device
        )

    def _fetch(self, batch: Batch, piece: Piece) -> None:
        grad = piece.param.grad
        assert grad is not None
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            values = grad.detach().reshape(-1)[piece.start : piece.stop]
            _staged(batch, piece).copy_(values, non_blocking=True)
            grad.record_stream(self._down)

    # -- one step ---------------------------------------------------------------------------------------------------
    def step(
        self,
        params: Iterable[Tensor],
        tensor_of: Callable[[Tensor, int, int, Tensor], AdamTensor],
        update: Callable[[list[AdamTensor]], int],
        home_of: Callable[[Tensor], Tensor],
    ) -> int:
        """Updates ``params``; returns the number of blocks left out.

        Args:
            params: those with a gradient, of the parameter's dtype and on its device.
            tensor_of: (parameter, start, stop, gradient in RAM) to the kernel's view of these values.
            update: the kernel.
            home_of: a parameter's flat weight in RAM, which `update` writes.
        """
        present = set(params)
        try:
            return self._step(present, tensor_of, update, home_of)
        except BaseException:
            self.drop()
            raise
        finally:
            self._finish(present, home_of)

    def _step(
        self,
        present: set[Tensor],
        tensor_of: Callable[[Tensor, int, int, Tensor], AdamTensor],
        update: Callable[[list[AdamTensor]], int],
        home_of: Callable[[Tensor], Tensor],
    ) -> int:
        self._uploaded.synchronize()  # the last weights have left the memory that is written now
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        waiting = deque(sorted(self.batches, key=lambda b: b.slot is None))
        coming: deque[tuple[Batch, list[Piece], torch.cuda.Event]] = deque()
        untouched = self._untouched(present)
        self._misses += not self._came_down.keys() <= untouched
        skipped = 0
        while waiting or coming:
            while waiting and (waiting[0].slot is not None or self._free):
                batch = waiting.popleft()
                pieces = [piece for piece in batch.pieces if piece.param in present]
                early = batch.slot is not None
                if batch.slot is None:
                    batch.slot = self._free.pop()
                for piece in pieces:
                    if piece.param not in untouched or not early:
                        self._fetch(batch, piece)
                event = torch.cuda.Event()
                event.record(self._down)
                coming.append((batch, pieces, event))
            batch, pieces, event = coming.popleft()
            event.synchronize()
            skipped += update([tensor_of(p.param, p.start, p.stop, _staged(batch, p)) for p in pieces])
            self._send(pieces, home_of)
            assert batch.slot is not None
            self._free.append(batch.slot)
            batch.slot = None
        return skipped

    def _untouched(self, present: set[Tensor]) -> set[Tensor]:
        """The parameters whose gradient came down during backward and has not changed since."""
        came = [p for p, seen in self._came_down.items() if p in present and seen[:2] == _mark(p)]
        if not came:
            return set()
        before = torch.stack([self._came_down[p].total for p in came])
        now = torch.stack([_total(p) for p in came])
        return {p for p, equal in zip(came, (before == now).tolist(), strict=True) if equal}

    def drop(self) -> None:
        """Forgets what came down: the step that it was for is not done."""
        for batch in self.batches:
            if batch.slot is not None:
                self._free.append(batch.slot)
                batch.slot = None
        self._came_down.clear()

    def _send(self, pieces: list[Piece], home_of: Callable[[Tensor], Tensor]) -> None:
        with torch.cuda.stream(self._up):
            for piece in pieces:
                param = piece.param.detach()
                if param.is_contiguous():
                    home = home_of(piece.param)
                    param.view(-1)[piece.start : piece.stop].copy_(home[piece.start : piece.stop], non_blocking=True)

    def _finish(self, present: set[Tensor], home_of: Callable[[Tensor], Tensor]) -> None:
        """Sends what could not go piece by piece, and makes whoever uses the weights wait for them."""
        self._came_down.clear()
        with torch.cuda.stream(self._up):
            for param in present:
                if not param.is_contiguous():
                    param.detach().copy_(home_of(param).view(param.shape), non_blocking=True)
        self._uploaded.record(self._up)
        torch.cuda.current_stream(self.device).wait_stream(self._up)


def _mark(param: Tensor) -> tuple[int, int]:
    assert param.grad is not None
    return param.grad.data_ptr(), param.grad._version


def _total(param: Tensor) -> Tensor:
    assert param.grad is not None
    return sum_of_bits(param.grad)


def sum_of_bits(x: Tensor) -> Tensor:
    """A sum over the bits of a tensor, ``int64``, where the tensor is; to be compared with later ones of that tensor.

    The change of any one value shows; some changes of several values do not (two that change places, say).
    """
    bits = codec.bits_of(x.detach())
    width = 8 // bits.element_size()
    whole = x.numel() // width * width
    aligned = bits.data_ptr() % 8 == 0 and bits.storage_offset() % width == 0
    if aligned and bits.is_contiguous():
        bits = bits.view(-1)
        # 8 bytes at a time: on a GPU the sum of a narrower type would first write all of it as int64.
        return bits[:whole].view(torch.int64).sum() + bits[whole:].sum(dtype=torch.int64)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in bits.reshape(-1).split(2**20)]).sum()


def all_finite(grads: list[Tensor], threads: int | None) -> bool:
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


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _hook_of(ring: weakref.ref[Staging]) -> Callable[[Tensor], None]:
    """A parameter's hook, which does not keep the ring alive when its optimizer is gone."""

    def hook(param: Tensor) -> None:
        alive = ring()
        if alive is not None:
            alive._on_gradient(param)

    return hook


def _staged(batch: Batch, piece: Piece) -> Tensor:
    assert batch.slot is not None
    size = (piece.stop - piece.start) * piece.param.element_size()
    return batch.slot[piece.offset : piece.offset + size].view(piece.param.dtype)


class Stagings:
    """A ``Staging`` for each device, made anew when its parameters are others."""

    def __init__(self) -> None:
        self._known: dict[torch.device, tuple[frozenset[tuple[int, torch.dtype, int]], Staging]] = {}

    def of(self, device: torch.device, params: list[Tensor], nbytes: int) -> Staging:
        """That of a device, for these parameters and through so many bytes."""
        key = frozenset((id(p), p.dtype, p.numel()) for p in params)
        known = self._known.get(device)
        if known is not None and known[0] == key:
            return known[1]
        if known is not None:
            known[1].close()
        staging = Staging(device, params, nbytes)
        self._known[device] = (key, staging)
        return staging

    def drop(self) -> None:
        """Forgets gradients that are on their way."""
        for _, staging in self._known.values():
            staging.drop()

    def close(self) -> None:
        """Lets go of all parameters."""
        for _, staging in self._known.values():
            staging.close()

    def synchronize(self) -> None:
        """Waits for all devices."""
        for device in self._known:
            torch.cuda.synchronize(device)
