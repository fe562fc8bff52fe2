"""Head and loss together on a real GPU: memory, exactness, and no waiting for the device."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from test_loss import Shapes
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_lowmem import head, loss
from hf_lowmem.head import DeferredLogits, Source, versions
from hf_lowmem.loss import chunked_causal_loss, use_chunked_loss

pytestmark = pytest.mark.gpu
WORDS, TOKENS, HIDDEN = 65536, 4096, 512
LOGITS = WORDS * TOKENS * 2  # bytes: 512 MiB


def run(monkeypatch, whole: bool, dtype: torch.dtype = torch.bfloat16):
    """Loss, gradients and the bytes by which memory grew, of a model whose logits are made as a whole or not."""
    monkeypatch.setattr(head, "WHOLE", 2**40 if whole else 2**27)
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(config).to("cuda", dtype).train()
    use_chunked_loss(model)
    tokens = torch.randint(0, WORDS, (4, TOKENS // 4), device="cuda")
    model(input_ids=tokens[:, :8], labels=tokens[:, :8]).loss.backward()  # what libraries keep from now on
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = model(input_ids=tokens, labels=tokens).loss
    value.backward()
    grown = torch.cuda.max_memory_allocated() - before
    return value.detach(), {n: p.grad for n, p in model.named_parameters()}, grown


def test_memory_is_a_formula(monkeypatch) -> None:
    monkeypatch.setattr(loss, "CHUNK", 2**27)
    monkeypatch.setattr(loss, "PIECE", 2**22)
    stock, expected, large = run(monkeypatch, whole=True)
    value, found, grown = run(monkeypatch, whole=False)
    torch.testing.assert_close(value, stock, rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm(), name
    assert large >= 2 * LOGITS
    weight = WORDS * HIDDEN * (4 + 2)  # its gradient in fp32, and rounded
    chunk = 2**27 + 3 * 4 * 2**22  # its logits, and three fp32 tensors of a piece
    model = TOKENS * HIDDEN * 2 * 48  # what one layer and its backward keep, hidden states and their gradients
    assert grown <= weight + chunk + model < large


def inputs_and_labels(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 1500, 256), (5000, 256), (5000,))
    inputs = [(torch.randn(shape, device="cuda") / 4).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(0, 5000, (2, 1500), device="cuda")
    labels[0, 3:200] = -100
    return inputs, labels


def deferred(inputs: list[torch.Tensor]) -> DeferredLogits:
    return DeferredLogits.of(Source(*inputs, inputs[0].dtype, (), versions(*inputs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_stock(monkeypatch, dtype) -> None:
    monkeypatch.setattr(loss, "CHUNK", 1)  # three chunks
    inputs, labels = inputs_and_labels(dtype)
    results = []
    for function, logits in ((ForCausalLMLoss, F.linear(*inputs)), (chunked_causal_loss, deferred(inputs))):
        value = function(logits, labels, 5000)
        results.append((value.detach(), torch.autograd.grad(value * 1024, inputs)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=0)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*wide).view(-1, 5000), targets) * 1024, wide)
    for stock, ours, e in zip(*(r[1][:2] for r in results), exact, strict=False):
        assert (ours - e).norm() <= 1.05 * (stock - e).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_widened_by_the_machine(dtype) -> None:
    a, b = torch.randn(3000, 1024, device="cuda").to(dtype), torch.randn(1024, 256, device="cuda").to(dtype)
    with Shapes() as shapes:
        total = loss._product(a, b)
        assert loss._product(a, b, total) is total
    assert loss._widens(a.device, dtype)
    assert {shape for shape, kind in shapes.seen if kind is torch.float32} <= {(3000, 256), (16, 16)}
    torch.testing.assert_close(total.double(), 2 * a.double() @ b.double(), rtol=1e-4, atol=1e-3)


def test_nothing_waits_for_the_device(monkeypatch) -> None:
    monkeypatch.setattr(loss, "CHUNK", 1)
    inputs, labels = inputs_and_labels(torch.bfloat16)
    loss._widens(inputs[0].device, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        chunked_causal_loss(deferred(inputs), labels, 5000).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.grad is not None for x in inputs)
