"""The loss over pieces of the logits is transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_lowmem import loss
from hf_lowmem.loss import chunked_causal_loss, use_chunked_loss, use_stock_loss

VOCABULARY = 50


@pytest.fixture(params=[1, 3 * VOCABULARY + 7, 10**9], ids=["a row", "three rows", "all at once"])
def piece(request, monkeypatch):
    monkeypatch.setattr(loss, "PIECE", request.param)


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(2, 11, VOCABULARY, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCABULARY, (2, 11), generator=generator)
    labels[0, 3:6] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(13)])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_same_value_and_gradient(piece, dtype, items, scale) -> None:
    logits, labels = case(dtype)
    results = []
    for function in (ForCausalLMLoss, chunked_causal_loss):
        x = logits.clone().requires_grad_()
        value = function(x, labels, VOCABULARY, num_items_in_batch=items)
        (value * scale).backward()
        results.append((value.detach(), x.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=0)
    assert torch.equal(results[1][1], results[0][1])


@pytest.mark.parametrize("kwargs", [{"ignore_index": 4}, {"shift": True}, {"extra": 1}])
def test_same_arguments(piece, kwargs) -> None:
    logits, labels = case(torch.float32)
    if kwargs.pop("shift", False):
        kwargs = {"shift_labels": labels.flip(1).contiguous()}
    labels = labels.clamp_min(0) if "ignore_index" in kwargs else labels
    stock = ForCausalLMLoss(logits, labels, VOCABULARY, **kwargs)
    torch.testing.assert_close(chunked_causal_loss(logits, labels, VOCABULARY, **kwargs), stock, rtol=1e-6, atol=0)


def test_nothing_to_predict_is_what_it_is_in_stock(piece) -> None:
    logits, labels = case(torch.float32)
    labels.fill_(-100)
    assert ForCausalLMLoss(logits, labels, VOCABULARY).isnan()
    assert chunked_causal_loss(logits, labels, VOCABULARY).isnan()
    assert chunked_causal_loss(logits, labels, VOCABULARY, num_items_in_batch=3) == 0


class Largest(TorchDispatchMode):
    """The most fp32 values that one tensor had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is torch.float32:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize(("function", "large"), [(ForCausalLMLoss, True), (chunked_causal_loss, False)])
def test_logits_are_never_all_of_them_in_fp32(monkeypatch, function, large) -> None:
    monkeypatch.setattr(loss, "PIECE", 3 * VOCABULARY)
    logits, labels = case(torch.bfloat16)
    with Largest() as seen:
        function(logits.requires_grad_(), labels, VOCABULARY).backward()
    assert (seen.most >= logits.numel()) == large
    assert seen.most >= 3 * VOCABULARY


def test_a_model_takes_it_and_gives_it_back(tiny) -> None:
    reference, model = tiny.model(), tiny.model()
    use_chunked_loss(model)
    assert model.loss_function is chunked_causal_loss
    tokens = torch.randint(3, 128, (2, 9))
    losses = [m(input_ids=tokens, labels=tokens).loss for m in (reference, model)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    use_stock_loss(model)
    assert model.loss_function is ForCausalLMLoss


def test_other_losses_are_left_alone(tiny) -> None:
    from transformers import LlamaForSequenceClassification

    def own(*args, **kwargs):
        raise AssertionError

    model = tiny.model()
    classifier = LlamaForSequenceClassification(model.config)
    before = classifier.loss_function
    model.loss_function = own
    for m in (model, classifier):
        use_chunked_loss(m)
    assert model.loss_function is own
    assert classifier.loss_function is before
