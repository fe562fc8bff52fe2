"""Inputs of checkpointed blocks in host memory, against plain checkpointing: the same bits. The device is the CPU."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections import deque

import pytest
import torch
from architectures import CASES, model_of
from architectures import run as run_case
from test_attachment import assert_same, build, checkpoint, gradients, run
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hf_lowmem import LowMemConfig
from hf_lowmem.activations import InputOffload
from hf_lowmem.attachment import attach, find_blocks

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
CPU = torch.device("cpu")
FUNCTION = "_gradient_checkpointing_func"


class _Copy:
    """A copy that is still to be made. Neither side is kept alive: that is the business of whoever asked for it."""

    def __init__(self, target, source) -> None:
        self.target, self.source = target, source


class LateCopies:
    """Copies that are made by chance, or when somebody waits for them: two queues, as a GPU's two streams."""

    device = CPU

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._queues: dict[str, deque[_Copy]] = {"up": deque(), "down": deque()}
        self.count = {"up": 0, "down": 0}

    def up(self, home, source):
        return self._start("up", _Copy(lambda: home, weakref.ref(source)))

    def down(self, home):
        tensor = torch.empty_strided(home.shape, home.stride(), dtype=home.dtype).fill_(float("nan"))
        return tensor, self._start("down", _Copy(weakref.ref(tensor), lambda: home))

    def wait(self, done):
        """And all that was put in the same queue before it."""
        for queue in self._queues.values():
            while done in queue:
                self._make(queue.popleft())

    def _start(self, name, new):
        self.count[name] += 1
        self._queues[name].append(new)
        queue = self._queues[self._random.choice(["up", "down"])]
        if queue and self._random.random() < 0.5:
            self._make(queue.popleft())
        return new

    def _make(self, pending):
        target, source = pending.target(), pending.source()
        assert target is not None, "let go of before its copy was done"
        assert source is not None, "let go of before its copy was done"
        target.data.copy_(source)


@pytest.fixture(params=["at once", "late"])
def copies(request, monkeypatch):
    if request.param == "late":
        monkeypatch.setattr("hf_lowmem.activations._HostCopies", lambda device: LateCopies())
    return request.param


def offloaded(model: nn.Module, ahead: int = 2) -> InputOffload:
    offload = InputOffload([module for _, module in find_blocks(model)], CPU, ahead)
    assert offload.install() > 0
    return offload


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in find_blocks(model)]


def pair(tiny, **changes):
    """Two equal models that checkpoint their blocks; the second one's inputs are in host memory."""
    reference, model = (tiny.model(**{"num_hidden_layers": 5, **changes}).train() for _ in range(2))
    for m in (reference, model):
        checkpoint(m, "non-reentrant")
    return reference, model, offloaded(model)


def step(model: nn.Module, length: int = 8, rows: int = 2) -> tuple[float, dict[str, torch.Tensor | None]]:
    tokens = torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(length))
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), gradients(model)


# -- the same bits --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("streaming", ["none", "cpu", "0.5"])
@pytest.mark.parametrize("kind", ["full", "frozen embedding", "norms alone", "lora", "experts"])
def test_offloaded_is_not_offloaded(tiny, copies, kind, streaming, ahead) -> None:
    reference, model = build(tiny, kind), build(tiny, kind)
    for m in (reference, model):
        checkpoint(m.get_base_model() if kind == "lora" else m, "non-reentrant")
    attach(model, LowMemConfig(offload=streaming, debug=True))
    offload = offloaded(model, ahead)
    for _ in range(2):
        assert_same(run(reference), run(model))
    assert not offload._there
    if copies == "late":
        blocks = len(offload.modules)
        on_device = min(ahead, blocks)  # these never left it
        assert offload._copies.count == {"up": 4 * blocks, "down": 4 * (blocks - on_device)}


@pytest.mark.parametrize("streaming", ["none", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["gpt2", "t5", "bart", "gpt-oss", "qwen3-moe", "gemma3n", "llava", "wav2vec2", "frozen first half", "swin"]
)
def test_architectures(tiny, copies, name, dtype, streaming) -> None:
    """With dropout where they have it; encoders with decoders; blocks that are skipped, frozen or of several sizes."""
    case = CASES[name]
    reference, model = (model_of(case, "non-reentrant", dtype) for _ in range(2))
    attach(model, LowMemConfig(offload=streaming, debug=True))
    offload = offloaded(model)
    assert_same(run_case(reference, case, dtype), run_case(model, case, dtype))
    assert offload.nbytes > 0


def test_autocast(tiny, copies) -> None:
    reference, model, _ = pair(tiny)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run(reference), run(model))


def test_two_forwards_before_one_backward(tiny, copies) -> None:
    losses = []
    for model in pair(tiny)[:2]:
        a, b = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8, 7, 6]])
        loss = model(input_ids=a, labels=a).loss - 0.5 * model(input_ids=b, labels=b).loss
        loss.backward()
        losses.append((loss.item(), gradients(model)))
    assert_same(*losses)


def test_backwards_in_the_order_of_their_forwards(tiny, copies) -> None:
    results = []
    for model in pair(tiny)[:2]:
        batches = [torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8, 7, 6]])]
        losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
        for loss in losses:
            loss.backward()
        results.append((losses[0].item(), gradients(model)))
    assert_same(*results)


def test_backward_twice(tiny, copies) -> None:
    results = []
    for model in pair(tiny)[:2]:
        tokens = torch.tensor([[5, 6, 7]])
        loss = model(input_ids=tokens, labels=tokens).loss
        for retain_graph in (True, True, False):
            loss.backward(retain_graph=retain_graph)
        results.append((loss.item(), gradients(model)))
    assert_same(*results)


def test_hidden_states_that_others_hold(tiny, copies) -> None:
    results = []
    for model in pair(tiny)[:2]:
        out = model(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True)
        loss = sum(x.square().mean() for x in out.hidden_states) + out.logits.mean()
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert_same(*results)


def test_removed_between_forward_and_backward(tiny, copies) -> None:
    results = []
    for model, offload in zip(pair(tiny)[:2], (None, True), strict=True):
        tokens = torch.tensor([[5, 6, 7]])
        loss = model(input_ids=tokens, labels=tokens).loss
        if offload:
            getattr(model.model.layers[0], FUNCTION).offload.remove()
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert_same(*results)


def test_every_second_layer(tiny, copies) -> None:
    reference, model = (tiny.model(num_hidden_layers=5).train() for _ in range(2))
    for m in (reference, model):
        enable = getattr(m, "activation_checkpointing_enable", m.gradient_checkpointing_enable)
        enable(every_n_layers=2)
    offload = InputOffload(blocks_of(model), CPU)
    assert offload.install() == 3
    assert_same(run(reference), run(model))
    assert offload._count == 6


def test_under_a_checkpoint_that_saves_on_the_cpu(tiny) -> None:
    """As transformers has one, whose function is no partial of torch's own."""
    reference, model, offload = pair(tiny)

    def saving(function, *args, **kwargs):
        with torch.autograd.graph.save_on_cpu():
            return torch_checkpoint(function, *args, **kwargs)

    for block in blocks_of(model):
        setattr(block, FUNCTION, functools.partial(saving, use_reentrant=False))
    assert offload.install() == 5
    assert_same(step(reference), step(model))
    assert offload._count == 5


class Block(nn.Module):
    """A block of one's own in the shape that transformers gives to its layers."""

    def __init__(self, function=None) -> None:
        super().__init__()
        self.linear, self.gradient_checkpointing = nn.Linear(6, 6), True
        self.seen: list[tuple] = []
        setattr(self, FUNCTION, function or functools.partial(torch_checkpoint, use_reentrant=False))

    def forward(self, *args, **kwargs):
        return getattr(self, FUNCTION)(functools.partial(self.compute, **kwargs), *args)

    def compute(self, x, scale=1.0, *more):
        self.seen.append((x.stride(), x.requires_grad, x.dtype, x.detach().clone()))
        return torch.tanh(self.linear(x.to(torch.float32))) * scale


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6),
        lambda: torch.randn(4, 6, requires_grad=True),
        lambda: torch.randn(4, 6, requires_grad=True) * 2,
        lambda: torch.randn(4, 6, dtype=torch.bfloat16),
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(6, 4, requires_grad=True).t(),
        lambda: torch.randn(3, 2, 4, 6).permute(2, 0, 1, 3),
        lambda: torch.randn(4, 1, 6).expand(4, 3, 6),
        lambda: torch.randn(4, 12)[:, 3:9],
    ],
)
def test_what_comes_back_is_what_was_kept(copies, make) -> None:
    blocks = [Block() for _ in range(3)]
    offload = InputOffload(blocks, CPU, ahead=0)
    offload.install()
    torch.manual_seed(0)
    x = make()
    blocks[0](x).sum().backward()
    first, again = blocks[0].seen
    assert first[1:3] == again[1:3]
    assert torch.equal(first[3], again[3])
    dense = x.numel() == x.untyped_storage().nbytes() // x.element_size()
    assert again[0] == (first[0] if dense else torch.empty(x.shape).stride())
    assert offload.nbytes == x.numel() * x.element_size()


def test_the_first_tensor_alone_and_only_real_numbers() -> None:
    given = []

    def watched(function, *args):
        given.append(args)
        return torch_checkpoint(function, *args, use_reentrant=False)

    block = Block(watched)
    offload = InputOffload([block], CPU)
    assert offload.install() == 1
    x, scale = torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(6)
    block(x, scale, "word")
    placeholder, *others = given.pop()
    # The checkpoint keeps the random state of the devices that it sees.
    assert (placeholder.device, placeholder.dtype, placeholder.numel()) == (x.device, x.dtype, 0)
    assert others[0] is scale
    assert others[1:] == ["word"]
    for other in (torch.ones(4, 6, dtype=torch.int64), nn.Parameter(torch.ones(4, 6)), torch.ones(0, 6)):
        block(other)
        assert given.pop()[0] is other
    with torch.no_grad():
        block(x)
    assert given.pop()[0] is x
    block(x=x)
    assert given.pop() == ()
    assert not offload.takes(torch.ones(4, 6, device="meta"))
    assert offload._count == 1


# -- memory ---------------------------------------------------------------------------------------------------------
def storages(model: nn.Module) -> list[StorageWeakRef]:
    """Of the blocks' inputs, as they come in the next forward."""
    seen: list[StorageWeakRef] = []
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda module, args: seen.append(StorageWeakRef(args[0].untyped_storage())))
    return seen


@pytest.mark.parametrize("streaming", ["none", "cpu"])
def test_the_device_lets_go_of_inputs(tiny, streaming) -> None:
    """Of all but the latest two in the forward, and in backward of all but the two that come next."""
    _, model, offload = pair(tiny, num_hidden_layers=6)
    attach(model, LowMemConfig(offload=streaming, debug=True))
    seen, there = storages(model), []
    tokens = torch.tensor([[5, 6, 7]])
    loss = model(input_ids=tokens, labels=tokens).loss
    assert [storage.expired() for storage in seen[:6]] == [True] * 4 + [False] * 2
    assert offload.nbytes == 6 * 3 * 64 * 4
    restore = offload.restore

    def counted(kept):
        tensor = restore(kept)
        there.append(len(offload._there))
        return tensor

    offload.restore = counted
    loss.backward()
    assert there == [2, 2, 2, 2, 1, 0]
    assert all(storage.expired() for storage in seen)


def test_a_plain_checkpoint_would_keep_them(tiny) -> None:
    """So the test above can tell."""
    model = tiny.model(num_hidden_layers=6).train()
    checkpoint(model, "non-reentrant")
    seen, tokens = storages(model), torch.tensor([[5, 6, 7]])
    loss = model(input_ids=tokens, labels=tokens).loss
    assert not any(storage.expired() for storage in seen)
    del loss
    assert all(storage.expired() for storage in seen)


def test_batches_of_all_lengths_take_the_memory_of_the_longest(tiny, copies) -> None:
    reference, model, offload = pair(tiny)
    lengths = [5, 17, 3, 29, 11, 29, 2, 23, 13, 28]
    made = []
    for i, length in enumerate(lengths):
        assert_same(step(reference, length), step(model, length))
        assert offload.nbytes == 5 * 2 * max(lengths[: i + 1]) * 64 * 4
        offload._pool._collect()
        made.append({id(buffer) for buffer in offload._pool._free})
    assert made[3] == made[-1]  # no new one after the longest batch
    offload.remove()
    assert offload.nbytes == 0


def test_the_smallest_buffer_that_is_large_enough(tiny) -> None:
    pool = InputOffload([], CPU)._pool
    buffers = [pool.take(nbytes) for nbytes in (100, 300, 200)]
    pool.returned.extend(buffers)
    assert pool.take(150) is buffers[2]
    assert pool.take(150) is buffers[1]
    assert pool.nbytes == 600
    larger = pool.take(150)  # in the place of the one of 100
    assert larger.memory.numel() == 150
    assert pool.nbytes == 650
    pool.returned.extend([larger, buffers[2]])
    pool.take(201)
    assert pool.nbytes == 300 + 150 + 201


def test_forwards_without_a_backward_give_their_memory_back(tiny) -> None:
    _, model, offload = pair(tiny)
    tokens = torch.tensor([[5, 6, 7]])
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
    assert offload.nbytes == 2 * 5 * 3 * 64 * 4  # the loss before this one lived while this one was made
    kept = [there.kept for there in offload._there.values()]
    assert all(inputs() is not None for inputs in kept)
    del loss
    assert all(inputs() is None for inputs in kept)  # what is still on the device keeps no graph alive
    offload.remove()
    assert offload.nbytes == 0
    assert not offload._there


def test_evaluation_keeps_nothing(tiny) -> None:
    _, model, offload = pair(tiny)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model(input_ids=tokens)
    model.eval()
    model(input_ids=tokens)
    model.generate(input_ids=tokens, max_new_tokens=3)
    assert (offload._count, offload.nbytes) == (0, 0)


def test_the_offload_goes_with_its_model(tiny) -> None:
    _, model, offload = pair(tiny)
    step(model)
    gone = weakref.ref(offload)
    del offload, model, _
    gc.collect()
    assert gone() is None


# -- what goes wrong ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streaming", ["none", "cpu"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle(tiny, copies, where, error, streaming) -> None:
    reference, model, offload = pair(tiny)
    attach(model, LowMemConfig(offload=streaming, debug=True))

    def fail(*args):
        raise error("on purpose")

    block = model.model.layers[2].mlp
    handle = block.register_forward_hook(fail) if where == "forward" else block.register_full_backward_hook(fail)
    for _ in range(3):
        with pytest.raises(error, match="on purpose"):
            step(model)
    handle.remove()
    gc.collect()
    for _ in range(2):
        assert_same(step(reference), step(model))
    assert offload.nbytes == 5 * 2 * 8 * 64 * 4


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("when", ["within the block", "after it"])
def test_an_input_that_is_written_to_in_place(copies, when, ahead) -> None:
    """A plain checkpoint would refuse as well."""
    blocks = [Block() for _ in range(3)]
    offload = InputOffload(blocks, CPU, ahead)
    offload.install()
    x = torch.randn(4, 6, requires_grad=True) * 2
    if when == "within the block":
        blocks[0].linear.register_forward_pre_hook(lambda module, args: [args[0].detach().add_(1)][:0] or None)
    y = blocks[0](x)
    if when == "after it":
        x.detach().add_(1)
    loss = blocks[2](blocks[1](y)).sum()
    with pytest.raises(RuntimeError, match=r"torch.float32 of shape \(4, 6\), was written to in place after"):
        loss.backward()


def test_an_input_that_is_written_to_after_its_copy(copies) -> None:
    """No harm is done: the copy is what counts."""
    block = Block()
    offload = InputOffload([block], CPU, ahead=0)
    offload.install()
    x = torch.randn(4, 6, requires_grad=True) * 2
    loss = block(x).sum()
    x.detach().add_(1)
    loss.backward()
    first, again = block.seen
    assert torch.equal(first[3], again[3])
