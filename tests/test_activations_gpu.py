"""Inputs of checkpointed blocks in host memory, on a real GPU with its streams; test_activations.py has the rest."""

from __future__ import annotations

import os

import pytest
import torch
from architectures import CASES, model_of
from test_activations import Block, blocks_of
from test_attachment import build, checkpoint, gradients, run
from test_attachment_gpu import assert_same_on_gpu

from hf_lowmem import LowMemConfig
from hf_lowmem.activations import InputOffload
from hf_lowmem.attachment import attach

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, for the fixture below
CUDA = torch.device("cuda")
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def offloaded(model: torch.nn.Module, ahead: int = 2) -> InputOffload:
    offload = InputOffload(blocks_of(model), CUDA, ahead)
    assert offload.install() > 0
    return offload


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("streaming", ["none", "cpu"])
@pytest.mark.parametrize("kind", ["full", "frozen embedding", "norms alone", "lora", "experts"])
def test_offloaded_is_not_offloaded(tiny, kind, streaming, ahead) -> None:
    reference, model = build(tiny, kind).cuda(), build(tiny, kind)
    for m in (reference, model):
        checkpoint(m.get_base_model() if kind == "lora" else m, "non-reentrant")
    attach(model, LowMemConfig(offload=streaming, debug=True))
    offload = offloaded(model, ahead)
    for _ in range(2):
        assert_same_on_gpu(run(reference), run(model))
    assert not offload._there
    assert offload.nbytes > 0


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart"])
def test_dropout(tiny, name) -> None:
    """The checkpoint restores the GPU's random state only where it sees a tensor of that GPU."""
    case = CASES[name]
    results = []
    for offloads in (False, True):
        model = model_of(case, "non-reentrant").cuda()
        if offloads:
            offloaded(model)
        torch.manual_seed(7)
        batch = {key: x.cuda() for key, x in case.batch(0).items()}
        loss = model(**batch).loss
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert_same_on_gpu(*results)


def test_a_block_gets_its_random_state_back() -> None:
    """Where nothing but its input is on the GPU."""
    seen = []

    class Dropping(Block):
        def compute(self, x):
            seen.append(torch.nn.functional.dropout(x, 0.5).detach().clone())
            return torch.tanh(self.linear(x))

    block = Dropping().cuda()
    offload = InputOffload([block], CUDA, ahead=0)
    offload.install()
    loss = block(torch.randn(64, 6, device="cuda", requires_grad=True)).sum()
    torch.rand(100, device="cuda")
    loss.backward()
    assert torch.equal(*seen)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_copies_under_load(tiny, ahead) -> None:
    """Large inputs of changing lengths, with many copies under way and memory that is used again at once."""
    models = []
    for offloads in (False, True):
        model = tiny.model(**WIDE).train().cuda()
        checkpoint(model, "non-reentrant")
        if offloads:
            offload = offloaded(model, ahead)
        models.append(model)
    for length in (512, 2048, 512, 1024, 2048, 256, 2048):
        results = []
        for model in models:
            model.zero_grad()
            tokens = torch.randint(3, 128, (4, length), generator=torch.Generator().manual_seed(length)).cuda()
            for _ in range(2):
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            results.append((loss.item(), gradients(model)))
        assert_same_on_gpu(*results)
    assert offload.nbytes == 12 * 4 * 2048 * 1024 * 2
    assert all(buffer._arena.pinned for buffer in [*offload._pool.returned, *offload._pool._free])


def test_backward_twice_and_two_forwards(tiny) -> None:
    results = []
    for offloads in (False, True):
        model = tiny.model(**WIDE).train().cuda()
        checkpoint(model, "non-reentrant")
        if offloads:
            offloaded(model)
        tokens = torch.randint(3, 128, (2, 512), generator=torch.Generator().manual_seed(0)).cuda()
        losses = [model(input_ids=rows[None], labels=rows[None]).loss for rows in tokens]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        results.append((losses[1].item(), gradients(model)))
    assert_same_on_gpu(*results)


def test_memory(tiny) -> None:
    """Of 12 inputs no more than the one in use and two others are on the GPU, in the forward and in backward."""
    tokens = torch.randint(3, 128, (4, 2048), device="cuda")
    nbytes = tokens.numel() * 1024 * 2
    held, peaks = [], []
    for offloads in (False, True):
        model = tiny.model(**WIDE).train().cuda()
        checkpoint(model, "non-reentrant")
        if offloads:
            offloaded(model)
        model(input_ids=tokens, labels=tokens).loss.backward()  # gradients have their memory now
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=tokens, labels=tokens).loss
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, loss
    assert held[0] - held[1] == pytest.approx(10 * nbytes, abs=nbytes)  # the latest two stay
    assert peaks[0] - peaks[1] >= 8 * nbytes


def test_the_cpu_does_not_wait(tiny) -> None:
    """While the GPU is busy with something long, a whole forward and backward is given to it."""
    model = tiny.model(**{**WIDE, "num_hidden_layers": 4}).train().cuda()
    checkpoint(model, "non-reentrant")
    offloaded(model)
    hidden = torch.randn(1, 128, 1024, device="cuda", dtype=torch.bfloat16)
    rope = model.model.rotary_emb(hidden, torch.arange(128, device="cuda")[None])

    def forward_and_backward():
        x = hidden.clone().requires_grad_()
        for layer in model.model.layers:
            x = layer(x, position_embeddings=rope)
        x.backward(hidden)

    for _ in range(2):  # buffers are pinned, kernels are loaded
        forward_and_backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e9))  # about 2 s
    busy = torch.cuda.current_stream().record_event()
    forward_and_backward()
    assert not busy.query()
    torch.cuda.synchronize()


def test_with_the_offload_of_transformers(tiny) -> None:
    """Which copies a layer's other arguments, on the stream that computes."""
    reference, model = (tiny.model(num_hidden_layers=4).train().cuda() for _ in range(2))
    checkpoint(reference, "non-reentrant")
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(offload=True)
    offload = offloaded(model)
    assert_same_on_gpu(run(reference), run(model))
    assert offload.nbytes > 0
