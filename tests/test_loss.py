"""The loss over pieces of the logits is transformers' own, whether the logits are there or deferred."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_lowmem import loss
from hf_lowmem.head import DeferredLogits, Op, Source, replayed, versions
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


# -- deferred logits ----------------------------------------------------------------------------------------------
WORDS, HIDDEN = 250, 48
CAP = (Op(torch.div, (3.0,)), Op(torch.tanh, ()), Op(torch.mul, (3.0,)))


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of 64 tokens, in pieces of three rows."""
    monkeypatch.setattr(loss, "LEAST", 64)
    monkeypatch.setattr(loss, "CHUNK", 1)
    monkeypatch.setattr(loss, "DEPTH", 64)
    monkeypatch.setattr(loss, "PIECE", 3 * WORDS + 7)


def head_case(dtype: torch.dtype, seed: int = 0, tokens: int = 96) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, weight and bias; labels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, tokens, HIDDEN), (WORDS, HIDDEN), (WORDS,))
    inputs = [(torch.randn(shape, generator=generator) / 1.5).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(0, WORDS, (2, tokens), generator=generator)
    labels[0, 3:20] = -100
    return inputs, labels


def deferred(inputs, ops=()) -> DeferredLogits:
    return DeferredLogits.of(Source(*inputs, inputs[0].dtype, ops, versions(*inputs)))


def whole(inputs, ops=()) -> torch.Tensor:
    return replayed(ops, F.linear(*inputs))


def exact_gradients(inputs, labels, ops, scale, items) -> tuple[torch.Tensor, ...]:
    """In fp64 throughout."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    value = F.cross_entropy(whole(wide, ops).view(-1, WORDS), targets, reduction="sum")
    return torch.autograd.grad(value * scale / (items or (targets != -100).sum()), wide)


@pytest.mark.parametrize("ops", [(), CAP], ids=["plain", "capped"])
@pytest.mark.parametrize("items", [None, 128])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_deferred_is_as_exact_as_stock(chunks, dtype, scale, items, ops) -> None:
    errors = {chunked_causal_loss: torch.zeros(2), ForCausalLMLoss: torch.zeros(2)}
    for seed in range(4):
        inputs, labels = head_case(dtype, seed)
        exact = exact_gradients(inputs, labels, ops, scale, items)
        values = []
        for function, logits in ((chunked_causal_loss, deferred(inputs, ops)), (ForCausalLMLoss, whole(inputs, ops))):
            values.append(function(logits, labels, WORDS, num_items_in_batch=items))
            found = torch.autograd.grad(values[-1] * scale, inputs)
            assert all(g.dtype == x.dtype and g.shape == x.shape for g, x in zip(found, inputs, strict=True))
            errors[function] += torch.tensor([(g - e).square().sum() for g, e in zip(found[:2], exact, strict=False)])
            assert (found[2] - exact[2]).norm() < 0.01 * exact[2].norm()
        torch.testing.assert_close(*values, rtol=1e-6, atol=0)
    # 128 only moves exponents, so that both round the same gradients of the logits.
    least = 1.001 if items == 128 and scale == 1 and dtype is torch.bfloat16 else 1.05
    assert (errors[chunked_causal_loss].sqrt() <= least * errors[ForCausalLMLoss].sqrt()).all()


@pytest.mark.parametrize("kwargs", [{"ignore_index": 4}, {"shift": True}, {"extra": 1}])
def test_deferred_takes_the_same_arguments(chunks, kwargs) -> None:
    inputs, labels = head_case(torch.float32)
    if kwargs.pop("shift", False):
        kwargs = {"shift_labels": labels.flip(1).contiguous()}
    labels = labels.clamp_min(0) if "ignore_index" in kwargs else labels
    stock = ForCausalLMLoss(whole(inputs), labels, WORDS, **kwargs)
    value = chunked_causal_loss(deferred(inputs), labels, WORDS, **kwargs)
    torch.testing.assert_close(value, stock, rtol=1e-6, atol=0)


def test_deferred_with_nothing_to_predict(chunks) -> None:
    inputs, labels = head_case(torch.float32)
    labels.fill_(-100)
    for items in (None, 0):
        value = chunked_causal_loss(deferred(inputs), labels, WORDS, num_items_in_batch=items)
        assert value.isnan()
        assert all((g == 0).all() for g in torch.autograd.grad(value, inputs))  # as in stock code
    value = chunked_causal_loss(deferred(inputs), labels, WORDS, num_items_in_batch=3)
    assert value == 0
    assert all((g == 0).all() for g in torch.autograd.grad(value, inputs))


@pytest.mark.parametrize(("words", "tokens"), [(WORDS, 95), (WORDS // 2, 96)])
def test_deferred_of_another_shape_fails_as_in_stock(chunks, words, tokens) -> None:
    inputs, labels = head_case(torch.float32)
    labels %= words
    for function, logits in ((ForCausalLMLoss, whole(inputs)), (chunked_causal_loss, deferred(inputs))):
        with pytest.raises((ValueError, RuntimeError)):
            function(logits, labels[:, :tokens], words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("moved", [1, 5 * 48 * 4, 2**26])
@pytest.mark.parametrize("words", [63, 64, 65, 127, 250, 1000])
def test_a_gradient_is_rounded_where_it_waited(monkeypatch, dtype, moved, words) -> None:
    """Rounded once, whole, in as much memory as it takes, and so that autograd adds to it in place."""
    monkeypatch.setattr(loss, "MOVED", moved)
    wide = torch.randn(words, 48, generator=torch.Generator().manual_seed(0))
    source = Source(torch.zeros(2, 48, dtype=dtype), torch.zeros(words, 48, dtype=dtype), None, dtype, (), ())
    fused = loss._Fused(source, torch.zeros(2, dtype=torch.int64), -100, (True, True, False), 1.0)
    pieces = [wide[part].clone() for part in fused.parts]
    places = [piece.data_ptr() for piece in pieces]
    factor = torch.tensor(0.3)
    found = loss._narrowed(pieces, factor, torch.Size((words, 48)), dtype)
    assert torch.equal(found, (wide * factor).to(dtype))
    if words >= 250:
        assert found.data_ptr() == places[0]
        assert found.untyped_storage().nbytes() <= 1.1 * found.nbytes
    assert not found._is_view()


def test_a_gradient_that_is_not_half_as_large_gets_memory_of_its_own() -> None:
    wide = torch.randn(6, 5, 4)
    pieces = [wide.view(30, 4)]
    found = loss._narrowed(pieces, torch.tensor(2.0), torch.Size((6, 5, 4)), torch.bfloat16)
    assert torch.equal(found, (2 * wide).bfloat16())
    assert found.untyped_storage().nbytes() == found.nbytes


def test_the_gradient_of_a_tied_weight_is_summed_in_place() -> None:
    """The head's comes first; the embedding's is added to it, and no third tensor of that size is made."""
    weight = torch.randn(1000, 48, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(0, 1000, (2, 96), generator=torch.Generator().manual_seed(0))
    places = []
    narrowed = loss._narrowed

    def watched(*args):
        out = narrowed(*args)
        places.append(out.data_ptr())
        return out

    hidden = torch.nn.functional.embedding(tokens, weight)
    logits = DeferredLogits.of(Source(hidden, weight, None, torch.bfloat16, (), versions(hidden, weight)))
    value = chunked_causal_loss(logits, tokens, 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_narrowed", watched)
        value.backward()
    assert len(places) == 2
    assert weight.grad.data_ptr() in places


def test_backward_again_and_without_gradients(chunks, monkeypatch) -> None:
    inputs, labels = head_case(torch.bfloat16)
    value = chunked_causal_loss(deferred(inputs), labels, WORDS)
    first = torch.autograd.grad(value, inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(value, inputs), strict=True))
    monkeypatch.delattr(loss._Fused, "run")  # it would compute gradients
    with torch.no_grad():
        assert not chunked_causal_loss(deferred(inputs), labels, WORDS).requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, inputs)


def test_autocast_around_the_loss_changes_nothing(chunks) -> None:
    """Its casts are those of the head's call, and the gradients' products are not cast to 16 bits."""
    inputs, labels = head_case(torch.float32)
    logits, other = deferred(inputs), deferred(inputs)
    value = chunked_causal_loss(logits, labels, WORDS)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunked_causal_loss(logits, labels, WORDS)
        read = other.clone()
    assert torch.equal(read, whole(inputs))
    assert torch.equal(inside, value)
    for one, same in zip(torch.autograd.grad(value, inputs), torch.autograd.grad(inside, inputs), strict=True):
        assert torch.equal(one, same)


def test_small_probabilities_do_not_vanish_in_fp16(chunks) -> None:
    """Of 3e-8, under the least that fp16 knows, while the loss is not scaled at all."""
    (hidden, weight, bias), labels = head_case(torch.float16)
    with torch.no_grad():
        bias.zero_()[0] = 17
        weight.mul_(0.01)
    labels.zero_()
    inputs = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    with torch.autocast("cpu", torch.float16):  # the gradients are fp32
        logits = DeferredLogits.of(Source(*inputs, torch.float16, (), versions(*inputs)))
        value = chunked_causal_loss(logits, labels, WORDS)
    found = torch.autograd.grad(value, inputs)[2]
    exact = exact_gradients(inputs, labels, (), 1.0, None)[2]
    assert exact[1:].max() < 6e-8
    assert (found - exact)[1:].norm() < 0.05 * exact[1:].norm()


class Shapes(TorchDispatchMode):
    """The shape and dtype of every tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[tuple[int, ...], torch.dtype]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.seen.add((tuple(x.shape), x.dtype))
        return out


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)], ids=["none", "hidden states", "head"])
def test_neither_logits_nor_needless_gradients_are_made(chunks, frozen) -> None:
    inputs, labels = head_case(torch.bfloat16)
    for i in frozen:
        inputs[i].requires_grad_(False)
    with Shapes() as control:
        ForCausalLMLoss(whole(inputs), labels, WORDS).backward()
    with Shapes() as shapes:
        chunked_causal_loss(deferred(inputs), labels, WORDS).backward()
    assert ((192, WORDS), torch.float32) in control.seen
    largest = max(torch.Size(shape).numel() for shape, _ in shapes.seen)
    assert largest == 64 * WORDS
    fp32 = {shape for shape, dtype in shapes.seen if dtype is torch.float32}
    assert ((192, HIDDEN) in fp32) == (0 not in frozen)
    assert ((WORDS - 128, HIDDEN) in fp32) == (1 not in frozen)  # the second piece of two


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_summed_in_fp32(monkeypatch, dtype) -> None:
    monkeypatch.setattr(loss, "DEPTH", 7)
    a, b = ((torch.randn(shape) * 3).to(dtype) for shape in ((5, 50), (50, 6)))
    total = loss._product(a, b)
    assert total.dtype is torch.float32
    again = loss._product(a, b, total)
    assert again.data_ptr() == total.data_ptr()
    torch.testing.assert_close(again.double(), 2 * a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_products_are_widened_by_the_machine_where_it_can(monkeypatch) -> None:
    """As CUDA does it: no operand is cast, and the sum is written over the total."""
    a, b = torch.randn(5, 50).bfloat16(), torch.randn(50, 6).bfloat16()
    expected = loss._product(a, b)
    mm, addmm = torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype: mm(x.to(out_dtype), y.to(out_dtype)))
    monkeypatch.setattr(
        torch, "addmm", lambda t, x, y, out_dtype, out: addmm(t, x.to(out_dtype), y.to(out_dtype), out=out)
    )
    loss._widens.cache_clear()
    try:
        assert loss._widens(a.device, torch.bfloat16)
        total = loss._product(a, b)
        assert loss._product(a, b, total) is total
    finally:
        loss._widens.cache_clear()
    torch.testing.assert_close(total, 2 * expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("words", "itemsize", "tokens"), [(128256, 2, 1024), (32000, 2, 4096), (262144, 4, 1024)])
def test_chunks_are_large_enough_for_the_products(words, itemsize, tokens) -> None:
    assert loss._whole_tiles(loss.CHUNK // (words * itemsize), least=loss.LEAST) == tokens


def test_no_memory_is_not_taken_for_a_machine_that_cannot_widen(monkeypatch) -> None:
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    loss._widens.cache_clear()
    before = loss._widens(torch.device("cpu"), torch.bfloat16)
    loss._widens.cache_clear()
    monkeypatch.setattr(torch, "addmm", full)
    with pytest.raises(torch.OutOfMemoryError):
        loss._widens(torch.device("cpu"), torch.bfloat16)
    monkeypatch.undo()
    assert loss._widens(torch.device("cpu"), torch.bfloat16) == before


@pytest.mark.parametrize("form", [deferred, whole])
def test_a_second_derivative_is_refused(chunks, form) -> None:
    """It would be dropped without a word."""
    inputs, labels = head_case(torch.float32)
    value = chunked_causal_loss(form(inputs), labels, WORDS)
    with pytest.raises(RuntimeError, match="has no second derivative, which create_graph=True asks for"):
        torch.autograd.grad(value, inputs[0], create_graph=True)
