"""Blocks that move to the device for good and back, and how much of it may be taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_lowmem import LowBitAdamW, LowMemConfig, attach
from hf_lowmem.placement import GpuMemory


def test_a_kept_block_moves_as_an_ordinary_one(tiny) -> None:
    """`.to()` reaches its parameters, casts are theirs, gradients come along both ways."""
    model = tiny.model(num_hidden_layers=4)
    streamer = attach(model, LowMemConfig(offload="cpu"), "cpu")
    tokens = torch.arange(3, 19)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
    block = streamer.blocks[1]
    home = streamer.shelf.weights(block.number).data_ptr()
    held = streamer.shelf.nbytes
    streamer.keep(block)
    streamer.keep(block)
    assert streamer.shelf.nbytes == held - block.layer.nbytes - block.gradient_layer.nbytes
    assert all(not home <= p.data_ptr() < home + block.layer.nbytes for _, p in block.params)
    for n, p in model.named_parameters():
        assert torch.equal(p, expected[n][0])
        assert torch.equal(p.grad, expected[n][1])
    streamer.give_up(block)
    streamer.give_up(block)
    assert streamer.shelf.nbytes == held
    for n, p in model.named_parameters():
        assert torch.equal(p, expected[n][0])
        assert torch.equal(p.grad, expected[n][1])
    streamer.keep(block)
    block.module.to(torch.bfloat16)
    assert next(block.module.parameters()).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="cannot be cast"):
        streamer.blocks[0].module.to(torch.bfloat16)


def test_gradients_are_those_of_the_model_wherever_blocks_rest(tiny) -> None:
    """Accumulated over changes of place."""
    model, twin = tiny.model(num_hidden_layers=4), tiny.model(num_hidden_layers=4)
    streamer = attach(model, LowMemConfig(offload="cpu", debug=True), "cpu")
    moves = [(streamer.keep, 0), (streamer.keep, 3), (streamer.give_up, 0), (streamer.keep, 1), (streamer.give_up, 3)]
    for number, (move, block) in enumerate(moves):
        tokens = torch.arange(3 + number, 19 + number)[None]
        for m in (model, twin):
            m(input_ids=tokens, labels=tokens).loss.backward()
        move(streamer.blocks[block])
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) > 0


def test_a_budget_is_not_the_next_one_s_ceiling(monkeypatch) -> None:
    total, fraction = 80 * 10**9, [1.0]
    cuda = {
        "mem_get_info": lambda device: (int(79e9), total),
        "memory_reserved": lambda device: 0,
        "get_per_process_memory_fraction": lambda device: fraction[0],
        "set_per_process_memory_fraction": lambda share, device: fraction.__setitem__(0, share),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    device = torch.device("cuda", 7)
    available = [GpuMemory(device, budget).available for budget in (5 * 10**8, 8 * 10**9, 24 * 10**9, None)]
    assert available == [0, 7_400_000_000, 23_400_000_000, int(79e9)]
    assert fraction == [1.0]
    fraction[0] = 0.25  # somebody else's
    assert GpuMemory(device, None).available == 20 * 10**9
    assert GpuMemory(device, 8 * 10**9).available == 7_400_000_000
    assert GpuMemory(device, None).available == 20 * 10**9
    assert GpuMemory(device, 5 * 10**8).limit == 0


def test_a_parameter_without_a_gradient_moves_too(tiny) -> None:
    """It has no state, and gets none by that."""
    model = tiny.model(num_hidden_layers=4)
    streamer = attach(model, LowMemConfig(offload="cpu"), "cpu")
    optimizer = LowBitAdamW(model.parameters())
    optimizer.about_to_move(p for _, p in streamer.blocks[0].params)
    assert not optimizer.state
    optimizer.load_state_dict(optimizer.state_dict())
