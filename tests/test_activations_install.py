"""How the offload of inputs gets into a model and out of it, and what it makes of those who come after it."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from test_activations import CPU, FUNCTION, Block, blocks_of, offloaded, pair, step
from test_attachment import assert_same, checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hf_lowmem.activations import InputOffload

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def functions(model: nn.Module) -> list:
    return [getattr(block, FUNCTION) for block in blocks_of(model)]


def test_installed_twice_and_removed(tiny) -> None:
    model = tiny.model().train()
    checkpoint(model, "non-reentrant")
    own = functions(model)
    offload = offloaded(model)
    installed = functions(model)
    assert not set(map(id, own)) & set(map(id, installed))
    assert offload.install() == 2
    assert [a is b for a, b in zip(functions(model), installed, strict=True)] == [True, True]
    offload.remove()
    assert [a is b for a, b in zip(functions(model), own, strict=True)] == [True, True]
    step(model)
    assert offload._count == 0
    offload.remove()
    assert [a is b for a, b in zip(functions(model), own, strict=True)] == [True, True]


def test_checkpointing_that_comes_late_and_goes(tiny) -> None:
    """As the Trainer enables it in train(), and TRL before."""
    model, reference = tiny.model().train(), tiny.model().train()
    offload = InputOffload(blocks_of(model), CPU)
    assert offload.install() == 0
    step(model)
    for expected in (2, 4):
        checkpoint(model, "non-reentrant")
        assert offload.install() == 2
        assert_same(step(reference), step(model))
        assert offload._count == expected
    model.gradient_checkpointing_disable()  # and leaves torch's function there, as it is
    assert offload.install() == 0
    assert_same(step(reference), step(model))
    assert offload._count == 4


@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, {"use_reentrant": None}, {"preserve_rng_state": True}])
def test_reentrant_is_refused(tiny, kwargs) -> None:
    model = tiny.model().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    own = functions(model)
    with pytest.raises(ValueError, match=r'Write gradient_checkpointing_kwargs=\{"use_reentrant": False\}'):
        InputOffload(blocks_of(model), CPU).install()
    assert [a is b for a, b in zip(functions(model), own, strict=True)] == [True, True]


def test_reentrant_is_what_torch_does_when_it_is_not_told() -> None:
    ran = []

    def watched(x):
        ran.append(torch.is_grad_enabled())
        return x * 2

    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        torch_checkpoint(watched, torch.ones(2, requires_grad=True))
    assert ran == [False]  # or else _is_reentrant is wrong for this torch


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_that_cannot_be_seen_is_refused_when_it_runs() -> None:
    block = Block(lambda function, *args: torch_checkpoint(function, *args, use_reentrant=True))
    InputOffload([block], CPU).install()
    with pytest.raises(ValueError, match="use_reentrant=True does not go together with offload_activations"):
        block(torch.randn(4, 6, requires_grad=True))


def test_copies_of_a_model_have_its_own_functions(tiny) -> None:
    reference, model, offload = pair(tiny)
    step(model)
    twin = copy.deepcopy(model)
    assert all(isinstance(function, functools.partial) for function in functions(twin))
    assert_same(step(reference), step(twin))
    block = pickle.loads(pickle.dumps(model.model.layers[0]))
    assert isinstance(getattr(block, FUNCTION), functools.partial)
    assert offload._count == 5


class Silent(Block):
    def compute(self, x):
        return torch.tanh(self.linear(x))


def test_compiled_blocks_are_left_alone() -> None:
    block, x = Silent(), torch.randn(4, 6)
    offload = InputOffload([block], CPU)
    offload.install()
    compiled = torch.compile(lambda x: block(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), block.compute(x))
    assert offload._count == 0
