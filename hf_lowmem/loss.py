"""The loss of a causal language model over pieces of its logits, so that a large vocabulary does not decide the peak.

transformers' own loss first writes all logits in fp32, then their log-softmax, then the gradient of each: for 8,192
tokens of 128,256 words 4.2 GB apiece. Here that happens to a few hundred tokens at a time, and all that is as large as
the logits is their gradient, in their own dtype. With ``use_liger_kernel`` the model does not get here: Liger's loss
makes no logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

PIECE = 2**25  # logits that are fp32 at one time: 128 MiB, and as much for each of the steps of a softmax


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

    Args:
        logits: ``[batch, tokens, vocab_size]``, in any float dtype.
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
    total = _SummedCrossEntropy.apply(logits.view(-1, vocab_size), targets, ignore_index)
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        out = torch.empty_like(logits)
        for (x, t), piece in zip(_pieces(logits, targets), out.split(_rows(logits)), strict=True):
            with torch.enable_grad():
                wide = x.detach().float().requires_grad_()
                loss = F.cross_entropy(wide, t, ignore_index=ctx.ignore_index, reduction="sum")
            piece.copy_(torch.autograd.grad(loss, wide, gradient)[0])
        return out, None, None


def _rows(logits: Tensor) -> int:
    return max(1, PIECE // logits.shape[1])


def _pieces(logits: Tensor, targets: Tensor) -> zip[tuple[Tensor, Tensor]]:
    return zip(logits.split(_rows(logits)), targets.split(_rows(logits)), strict=True)


def use_chunked_loss(model: nn.Module) -> None:
    """Gives the model this loss where it has transformers' own for causal language models."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or "_loss_function" in vars(module):
            continue
        if LOSS_MAPPING.get(str(getattr(module, "loss_type", None))) is ForCausalLMLoss:
            module.loss_function = chunked_causal_loss


def use_stock_loss(model: nn.Module) -> None:
    """Undoes ``use_chunked_loss``."""
    for module in model.modules():
        if vars(module).get("_loss_function") is chunked_causal_loss:
            del module._loss_function
