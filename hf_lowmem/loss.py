"""The loss of a causal language model over pieces of its logits, so that a large vocabulary does not decide the peak.

transformers' own loss first writes all logits in fp32, then their log-softmax, then the gradient of each: for 8,192
tokens of 128,256 words 4.2 GB apiece. Here that happens to a few hundred tokens at a time.

Logits of up to ``head.WHOLE`` bytes are there as a whole all the same, and so is their gradient, in their own dtype.
Larger ones are deferred (``head.py``): head and loss are computed together, a thousand tokens or more at a time, and
the gradients of the hidden states and of the head's weight with them, in the forward. What lasts until backward are
these two, in fp32. With ``use_liger_kernel`` the model does not get here: Liger's loss makes no logits either.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from .head import DeferredLogits, Source, defer_logits, never_defer, replayed

PIECE = 2**25  # logits that are fp32 at one time: 128 MiB, and as much for each of the steps of a softmax
CHUNK = 2**28  # bytes of logits that are there at one time where they are deferred: 256 MiB
LEAST = 1024  # tokens of a chunk, however many words there are: fewer would starve the matrix products
DEPTH = 4096  # terms of a product that are cast at one time, where the machine cannot widen them by itself
MOVED = 2**26  # bytes of a gradient that are rounded at one time where they move
LIFT = 2.0**15  # by which fp16 gradients of logits, at most 1, are lifted over what fp16 rounds to zero


def chunked_causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``ForCausalLMLoss`` of transformers: the same gradients, and the same value but for the order of the sum.

    Of deferred logits the gradients are as exact as those of stock code, but not the same bits.

    Args:
        logits: ``[batch, tokens, vocab_size]``, in any float dtype; also deferred ones.
        labels: ``[batch, tokens]``; each token predicts the next one.
        vocab_size: of the logits.
        num_items_in_batch: what the sum is divided by; None: the number of labels that are not ignored.
        ignore_index: the label that counts for nothing.
        shift_labels: labels that are shifted already, instead of ``labels``.
        kwargs: ignored, as there.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    source = _to_be_fused(logits, targets, vocab_size)
    if source is not None:
        total = _HeadAndCrossEntropy.apply(*source.inputs, targets, ignore_index, source)
    else:
        total = _SummedCrossEntropy.apply(logits.view(-1, vocab_size), targets, ignore_index)
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


# -- logits that are there ----------------------------------------------------------------------------------------
class _SummedCrossEntropy(torch.autograd.Function):
    """The cross entropy in fp32, summed; the gradient is computed from the logits again, with torch's own functions."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.ignore_index = ignore_index
        losses = [
            F.cross_entropy(x.float(), t, ignore_index=ignore_index, reduction="sum")
            for x, t in _pieces(logits, targets)
        ]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second_derivative()
        logits, targets = ctx.saved_tensors
        out = torch.empty_like(logits)
        for (x, t), piece in zip(_pieces(logits, targets), out.split(_rows(logits)), strict=True):
            with torch.enable_grad():
                wide = x.detach().float().requires_grad_()
                loss = F.cross_entropy(wide, t, ignore_index=ctx.ignore_index, reduction="sum")
            piece.copy_(torch.autograd.grad(loss, wide, gradient)[0])
        return out, None, None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError(
            "the loss in pieces has no second derivative, which create_graph=True asks for: compute the loss from "
            "output.logits, or call hf_lowmem.loss.use_stock_loss(model)"
        )


def _rows(logits: Tensor) -> int:
    return max(1, PIECE // logits.shape[1])


def _pieces(logits: Tensor, targets: Tensor) -> zip[tuple[Tensor, Tensor]]:
    return zip(logits.split(_rows(logits)), targets.split(_rows(logits)), strict=True)


# -- logits that are deferred -------------------------------------------------------------------------------------
def _to_be_fused(logits: Tensor, targets: Tensor, vocab_size: int) -> Source | None:
    """What the logits are computed from, if the loss can be taken from that; None: they are (to be) there."""
    source = logits.source_if_pending if type(logits) is DeferredLogits else None
    if source is None or not torch.is_grad_enabled():
        return None
    words, tokens = source.weight.shape[0], source.hidden.shape[:-1].numel()
    if vocab_size != words or targets.numel() != tokens:
        return None  # stock code has an error for that, or an answer
    if source.dtype is torch.float16 and source.ops:
        return None  # a scaling could carry lifted gradients over fp16's range
    return source


class _HeadAndCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies, in fp32, of ``hidden @ weight.T + bias``.

    The gradients are there after the forward, for an incoming gradient of 1. They wait in fp32: backward multiplies
    them with the incoming gradient and rounds them to their dtype, once, in the same pass over them. It uses them up; a
    second backward through the same graph computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        source: Source,
    ) -> Tensor:
        ctx.likes = [None if x is None else (x.shape, x.dtype) for x in (hidden, weight, bias)]
        ctx.lift = LIFT if source.dtype is torch.float16 else 1.0
        ctx.how = source.dtype, source.ops, ignore_index
        fused = _fused(ctx, hidden, weight, bias, targets)
        total = fused.run()
        ctx.counted = (targets != ignore_index).any()  # if none is, the loss may be divided by 0, and the gradient is 0
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.wide = fused.gradients
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        factor = torch.where(ctx.counted, gradient / ctx.lift, 0.0)
        wide, ctx.wide = ctx.wide, None
        if wide is None:
            fused = _fused(ctx, *ctx.saved_tensors)
            fused.run()
            wide = fused.gradients
        result: list[Tensor | None] = []
        while wide:  # what one was computed from is free before the next one needs memory
            pieces, like = wide.pop(0), ctx.likes[len(result)]
            result.append(None if pieces is None else _narrowed(pieces, factor, *like))
            del pieces
        return (*result, None, None, None)


def _fused(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> _Fused:
    dtype, ops, ignore_index = ctx.how
    inputs = (None if x is None else x.detach() for x in (hidden, weight, bias))
    source = Source(*inputs, dtype, ops, ())  # type: ignore[arg-type, call-arg]
    return _Fused(source, targets, ignore_index, ctx.needs_input_grad, ctx.lift)


def _narrowed(pieces: list[Tensor], factor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """``factor`` times the pieces, one after another, in one tensor of their own memory where that is large enough.

    What is rounded to half the bytes goes to where the first half of the pieces was: the head's weight is among the
    largest tensors of a model, and its gradient comes when the most is on the device.

    Args:
        pieces: of the rows; they are used up.
        shape, dtype: of the result.
    """
    first, nbytes = pieces[0], shape.numel() * dtype.itemsize
    out, start = torch.empty(0, dtype=dtype, device=first.device), 0
    if not nbytes <= first.nbytes <= 1.1 * nbytes:
        out = torch.empty(shape, dtype=dtype, device=first.device)
    else:  # no view, and without its storage's Python object: autograd adds to it in place if nobody else has it
        out.set_(first.view(dtype).view(-1)[: shape.numel()].view(shape))  # type: ignore[call-overload]
    flat = out.view(-1, *first.shape[1:])
    if out.data_ptr() == first.data_ptr():
        step = max(1, MOVED // max(1, first[:1].nbytes))
        for rows in _slices(len(first), step):  # what is written lies before what is still to be read
            flat[rows] = torch.mul(first[rows], factor, out=torch.empty_like(first[rows], dtype=dtype))
        start = len(first)
    for piece in pieces[1:] if start else pieces:
        torch.mul(piece, factor, out=flat[start : start + len(piece)])
        start += len(piece)
    return out


class _Fused:
    """One forward of head and loss, chunk by chunk.

    Args:
        source: the logits.
        targets: ``int64[tokens]``.
        ignore_index: the target that counts for nothing.
        needs: whether hidden states, weight and bias need their gradients.
        lift: the factor that is put on the gradients.

    Attributes:
        gradients: of hidden states ``[tokens, hidden]``, weight and bias, times ``lift``, in fp32 (fp64 for fp64); None
            where not needed. Each in pieces of its rows, of which the first takes as many bytes as the whole will.
    """

    def __init__(self, source: Source, targets: Tensor, ignore_index: int, needs: Any, lift: float) -> None:
        self.source, self.lift = source, lift
        self.ignored = targets == ignore_index
        self.targets = targets.masked_fill(self.ignored, 0)
        self.hidden = source.hidden.reshape(-1, source.hidden.shape[-1])
        self.weight = source.weight.to(source.dtype)  # one cast for all chunks
        self.bias = None if source.bias is None else source.bias.to(source.dtype)
        self.wide = torch.promote_types(source.dtype, torch.float32)
        self.needs = needs
        rows = [torch.empty_like(self.hidden, dtype=self.wide)] if needs[0] else None
        self.gradients: list[list[Tensor] | None] = [rows, None, None]
        words, narrow = len(self.weight), source.weight.dtype.itemsize / self.wide.itemsize
        split = min(words, -(-int(words * narrow + 0.5) // 64) * 64)
        self.parts = [slice(0, split), slice(split, words)][: 1 + (split < words)]

    def run(self) -> Tensor:
        """The sum of the losses."""
        words = self.weight.shape[0]
        size = _whole_tiles(CHUNK // (words * self.source.dtype.itemsize), least=LEAST)
        losses: list[Tensor] = []
        with torch.autocast(self.hidden.device.type, enabled=False):
            for rows in _slices(len(self.targets), size):
                losses += self._chunk(rows)
            return torch.stack(losses).sum()

    def _chunk(self, rows: slice) -> list[Tensor]:
        ignored = self.ignored[rows]
        # As zeros the rows that do not count add nothing to the weight's gradient, whatever their logits' gradient is.
        hidden = self.hidden[rows].to(self.source.dtype).masked_fill(ignored[:, None], 0)
        logits = F.linear(hidden, self.weight, self.bias)
        size = _whole_tiles(PIECE // logits.shape[1], least=1)
        losses = [self._into_gradient(logits[r], self.targets[rows][r], ignored[r]) for r in _slices(len(hidden), size)]
        gradient = logits  # by now
        if self.gradients[0] is not None:
            self.gradients[0][0][rows] = _product(gradient, self.weight).masked_fill_(ignored[:, None], 0)
        if self.needs[1]:
            totals: list[Any] = self.gradients[1] or [None] * len(self.parts)
            pairs = zip(self.parts, totals, strict=True)
            self.gradients[1] = [_product(gradient[:, part].t(), hidden, total) for part, total in pairs]
        if self.needs[2]:
            bias = gradient.masked_fill_(ignored[:, None], 0).sum(0, dtype=self.wide)
            self.gradients[2] = [bias if self.gradients[2] is None else self.gradients[2][0].add_(bias)]
        return losses

    def _into_gradient(self, logits: Tensor, targets: Tensor, ignored: Tensor) -> Tensor:
        """Writes the gradient of the loss into its place. Returns: the loss.

        Args:
            logits: ``[tokens, words]`` of the product, before the recorded operations.
            targets: ``int64[tokens]``, 0 where ignored.
            ignored: ``bool[tokens]``.
        """
        ops = self.source.ops
        with torch.set_grad_enabled(bool(ops)):
            product = logits.detach().requires_grad_(bool(ops))
            final = replayed(ops, product)
        logs = F.log_softmax(final.detach().float(), -1)
        targets = targets[:, None]
        chosen = logs.gather(1, targets)
        gradient = torch.empty_like(final, requires_grad=False) if ops else logits
        if self.lift == 1:
            torch.exp(logs, out=gradient)
        else:
            torch.mul(logs.exp_(), self.lift, out=gradient)
        # p - 1 of the word that was right, before p is rounded.
        gradient.scatter_(1, targets, chosen.expm1().mul_(self.lift).to(gradient.dtype))
        if ops:
            logits.copy_(torch.autograd.grad(final, product, gradient)[0])
        return -chosen[:, 0].masked_fill(ignored, 0).sum()


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _whole_tiles(rows: int, least: int) -> int:
    """Rounded down to what matrix products and a GPU's processors divide evenly."""
    return max(least, rows // 128 * 128 if rows >= 128 else rows)


def _product(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """``total + a @ b`` in fp32 (fp64 for fp64), written over ``total``; without it a new tensor.

    Args:
        a: ``[m, k]``.
        b: ``[k, n]``, of the same dtype.
        total: ``[m, n]``, in the wide dtype.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if _widens(a.device, a.dtype):
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.addmm(total, a, b, out_dtype=wide, out=total)
    if total is None:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=wide, device=a.device)
    for terms in _slices(a.shape[1], DEPTH):
        total.addmm_(a[:, terms].to(wide), b[terms].to(wide))
    return total


@functools.cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype can be added to an fp32 tensor as they are."""
    a = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
        torch.mm(a, a, out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise  # which says nothing about products, and must not be remembered
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


# -- on a model ---------------------------------------------------------------------------------------------------
def use_chunked_loss(model: nn.Module) -> None:
    """Gives the model this loss where it has transformers' own for causal language models.

    Its logits are then deferred, where they are large.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _stock_loss(module) is ForCausalLMLoss:
            module.loss_function = chunked_causal_loss
            defer_logits(module)


def _stock_loss(model: PreTrainedModel) -> Any:
    """The loss that transformers would take, by the model's class; None if somebody has given it another."""
    if vars(model).get("_loss_function", chunked_causal_loss) is not chunked_causal_loss:
        return None
    kind = getattr(model, "loss_type", None)
    if kind in LOSS_MAPPING:
        return LOSS_MAPPING[kind]
    return ForCausalLMLoss if model.get_output_embeddings() is not None else None  # the default of such as GPT-2


def use_stock_loss(model: nn.Module) -> None:
    """Undoes ``use_chunked_loss``."""
    for module in model.modules():
        if vars(module).get("_loss_function") is chunked_causal_loss:
            del module._loss_function
    never_defer(model)
