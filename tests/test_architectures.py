"""Tiny models of many architectures, streamed against unstreamed: the same losses, gradients, buffers and tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from architectures import CASES, cast, model_of, run, text
from test_attachment import LateLink, assert_at_home, assert_same, gradients
from torch import nn

from hf_lowmem import LowMemConfig, attachment
from hf_lowmem.attachment import attach, detach, find_blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),  # DeBERTa's, in 5.17
]
NAMES = [pytest.param(name, id=name.replace(" ", "-")) for name in CASES]


@pytest.fixture(autouse=True)
def one_thread(tiny) -> None: ...


def skip_what_is_not_there(name: str) -> None:
    if name == "dory with loops" and not hasattr(transformers, "DoryForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no Dory")


@pytest.mark.parametrize(
    ("offload", "checkpointing", "link", "dtype"),
    [
        ("cpu", "off", "late", torch.bfloat16),
        ("cpu", "non-reentrant", "host", torch.float32),
        (0.5, "off", "host", torch.float32),
        (0.5, "non-reentrant", "late", torch.bfloat16),
    ],
    ids=["all-bf16-late", "all-checkpointed", "half", "half-checkpointed-bf16-late"],
)
@pytest.mark.parametrize("name", NAMES)
def test_streamed_is_unstreamed(monkeypatch, name, offload, checkpointing, link, dtype) -> None:
    skip_what_is_not_there(name)
    case = CASES[name]
    if checkpointing != "off" and not case.checkpoints:
        pytest.skip("transformers cannot checkpoint it")
    if link == "late":
        monkeypatch.setattr(attachment, "HostLink", LateLink)
    reference, model = (model_of(case, checkpointing, dtype) for _ in range(2))
    streamer = attach(model, LowMemConfig(offload=offload, debug=link == "late"))
    whole, streamed = run(reference, case, dtype), run(model, case, dtype)
    assert all(torch.tensor(loss).isfinite() for loss in whole[0])
    assert any(gradient is not None and gradient.any() for gradient in whole[1].values())
    assert_same(whole, streamed)
    for (key, one), (_, other) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(one, other), key
    assert_at_home(streamer)
    assert not streamer._there
    if case.generates:
        prompt = cast({key: x for key, x in case.batch(0).items() if key != "labels"}, dtype)
        for m in (reference, model):
            m.config.output_router_logits = False  # the auxiliary loss takes no padded prompt
        made = [m.eval().generate(**prompt, max_new_tokens=4, do_sample=False) for m in (reference, model)]
        assert torch.equal(*made)
        assert_at_home(streamer)


@pytest.mark.parametrize("name", NAMES)
def test_most_of_it_is_streamed(name) -> None:
    """Of what is no embedding. All blocks are found, and a share of them is that share of the bytes."""
    skip_what_is_not_there(name)
    model = model_of(CASES[name])
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embeddings |= set() if head is None else set(head.parameters())
    others = {p for p in model.parameters() if p not in embeddings}
    streamer = attach(model, LowMemConfig(offload="cpu"))
    streamed = [p for block in streamer.blocks for _, p in block.params]
    assert len(streamed) == len(set(streamed))
    assert sum(p.numel() for p in others.intersection(streamed)) > 0.5 * sum(p.numel() for p in others)
    assert [block.name for block in streamer.blocks] == [found for found, _ in find_blocks(model)]
    detach(model)


@pytest.mark.parametrize("link_class", [attachment.HostLink, LateLink])
def test_a_policy_and_its_frozen_reference(monkeypatch, link_class) -> None:
    """Two streamed models take turns before one backward, as in preference tuning."""
    monkeypatch.setattr(attachment, "HostLink", link_class)
    results = []
    for streamed in (False, True):
        policy, frozen_one = model_of(CASES["llama"]), model_of(CASES["llama"]).requires_grad_(False).eval()
        streamers = [attach(m, LowMemConfig(offload="cpu")) for m in (policy, frozen_one)] if streamed else []
        losses = []
        for step in range(2):
            rewards = []
            for batch in (text(2 * step), text(2 * step + 1)):
                loss = policy(**batch).loss
                with torch.no_grad():
                    rewards.append(frozen_one(**batch).loss - loss.detach())
                rewards[-1] = rewards[-1] - loss + loss.detach()
            loss = -torch.nn.functional.logsigmoid(rewards[0] - rewards[1])
            loss.backward()
            losses.append(loss.item())
        results.append((losses, gradients(policy)))
        for streamer in streamers:
            assert_at_home(streamer)
        assert all(p.grad is None for p in frozen_one.parameters())
    assert_same(*results)
