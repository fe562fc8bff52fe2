"""LowBitAdamW against torch.optim.AdamW at 32 bits, against itself at 4, and everything that it must refuse."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from optimizing import WIDTHS, give_gradients, parameters, run, same, saved, states_equal
from torch import Tensor, nn

from hf_lowmem import codec
from hf_lowmem import state as states
from hf_lowmem.kernels.adam import AdamConstants, AdamTensor, adam_step
from hf_lowmem.optim import LowBitAdamW, param_bits
from hf_lowmem.staging import PIECE, cut


# -- against torch --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95)])
def test_32_bits_is_torch_adamw(weight_decay: float, betas: tuple[float, float]) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8}
    run(ours, LowBitAdamW(ours, state_bits=32, master_bits=32, **options), range(50))
    run(theirs, torch.optim.AdamW(theirs, **options), range(50))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("state_bits", "far"), [(4, 0.02), (8, 0.003)])
def test_low_bits_stay_near_torch_adamw(state_bits: int, far: float) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    full = [nn.Parameter(p.detach().float()) for p in theirs]
    run(ours, LowBitAdamW(ours, lr=1e-2, state_bits=state_bits), range(10))
    for step in range(10):
        give_gradients(theirs, 100 + step)
        for p, q in zip(full, theirs, strict=True):
            p.grad = q.grad.float()
        if step == 0:
            reference = torch.optim.AdamW(full, lr=1e-2)
        reference.step()
    for a, b in zip(ours[:3], full[:3], strict=True):
        assert (a.float() - b).norm() < far * b.norm()


def test_gradient_scale_is_a_scaled_gradient() -> None:
    ours, theirs = parameters(), parameters()
    a, b = (LowBitAdamW(p, state_bits=32, lr=1e-2) for p in (ours, theirs))
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step, scale=0.125)  # a power of two: nothing is rounded
        a.scale_gradients(0.125)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_gradient_scale_holds_for_one_step() -> None:
    ours, theirs = parameters(), parameters()
    a, b = LowBitAdamW(ours), LowBitAdamW(theirs)
    give_gradients(ours, 0)
    a.scale_gradients(0.0)
    a.step()
    give_gradients(theirs, 0, scale=0.0)
    b.step()
    run(ours, a, range(3))
    run(theirs, b, range(3))
    assert same(ours, theirs)


# -- against itself -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("state_bits", "master_bits"), WIDTHS)
def test_resumed_is_never_stopped(dtype: torch.dtype, state_bits: int, master_bits: int) -> None:
    options = {"lr": 1e-2, "state_bits": state_bits, "master_bits": master_bits, "seed": 5}
    straight = parameters(dtype)
    whole = LowBitAdamW(straight, **options)
    run(straight, whole, range(6))
    stopped = parameters(dtype)
    first = LowBitAdamW(stopped, threads=1, **options)
    run(stopped, first, range(3))
    file, weights = saved(first), [p.detach().clone() for p in stopped]
    resumed = parameters(dtype, seed=9)
    second = LowBitAdamW(resumed, threads=3, **options)  # made before the weights are loaded
    second.load_state_dict(file)
    with torch.no_grad():
        for p, w in zip(resumed, weights, strict=True):
            p.copy_(w)
    run(resumed, second, range(3, 6))
    assert same(straight, resumed)
    assert states_equal(whole, second)


@pytest.mark.parametrize("state_bits", [4, 8, 32])
def test_parts_of_a_parameter_are_the_whole(state_bits: int) -> None:
    n = 5 * 256 + 77
    whole, parts = (_kernel_tensors(n, state_bits) for _ in range(2))
    adam_step([whole])
    grad = parts.grad
    for start, stop in ((0, 512), (512, 1280), (1280, n)):
        adam_step([_with_gradient(parts.part(start, stop), grad[start:stop])])
    for name in ("weight", "m", "v", "m_scale", "v_scale", "extension"):
        a, b = getattr(whole, name), getattr(parts, name)
        assert a is b is None or torch.equal(a, b), name


def _kernel_tensors(n: int, bits: int) -> AdamTensor:
    gen = torch.Generator().manual_seed(1)
    state = states.new_state(n, bits, 0)
    return AdamTensor(
        weight=torch.randn(n, generator=gen).bfloat16(),
        grad=torch.randn(n, generator=gen).bfloat16(),
        m=state["m"],
        v=state["v"],
        m_scale=state.get("m_scale"),
        v_scale=state.get("v_scale"),
        bits=bits,
        constants=AdamConstants.of(bits, 1, 1e-2, 0.9, 0.999, 1e-8, 0.1),
        key=codec.tensor_key(0, 1, 0),
        extension=torch.zeros(n, dtype=torch.int8),
    )


def _with_gradient(tensor: AdamTensor, grad: Tensor) -> AdamTensor:
    tensor.grad = grad
    return tensor


def test_batches_hold_every_value_once() -> None:
    params = [torch.empty(n, device="meta", dtype=torch.bfloat16) for n in (5, 3 * PIECE + 7, 1000, PIECE)]
    seen = {id(p): 0 for p in params}
    for batch in cut(params):
        assert batch.values <= PIECE
        for piece in batch.pieces:
            assert piece.start % 256 == 0
            seen[id(piece.param)] += piece.stop - piece.start
    assert list(seen.values()) == [p.numel() for p in params]


def test_not_contiguous_parameter() -> None:
    flat = nn.Parameter(torch.randn(70, 90))
    turned = nn.Parameter(torch.empty(0))
    turned.data = flat.detach().t().contiguous().t()
    assert not turned.is_contiguous()
    for p in (flat, turned):
        run([p], LowBitAdamW([p], lr=1e-2), range(3))
    assert torch.equal(flat, turned)


def test_frozen_and_late_unfrozen() -> None:
    params = parameters()
    optimizer = LowBitAdamW(params[:2], lr=1e-2)
    params[0].requires_grad_(False)
    before = params[0].detach().clone()
    give_gradients(params[1:], 0)
    optimizer.step()
    assert torch.equal(params[0], before)
    assert not optimizer.state[params[0]]
    params[0].requires_grad_(True)
    optimizer.add_param_group({"params": [params[2]], "lr": 0.5, "state_bits": 8})
    run(params[:3], optimizer, range(1))
    assert [optimizer.state[p]["step"] for p in params[:3]] == [1, 2, 1]
    assert optimizer.state[params[2]]["bits"] == 8
    assert (params[2] - parameters()[2]).abs().max() > 0.3


def test_tied_parameter_is_stepped_once() -> None:
    embedding, head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    optimizer = LowBitAdamW(model.parameters(), state_bits=32)
    head(embedding(torch.arange(80))).square().sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 1
    assert optimizer.state[embedding.weight]["step"] == 1


def test_closure() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = LowBitAdamW([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 5.0
    assert torch.all(p < 1)


def test_deepcopy_and_pickle() -> None:
    params = parameters(torch.bfloat16)
    optimizer = LowBitAdamW(params, lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    run(params, optimizer, range(2))
    copies = copy.deepcopy((params, optimizer)), pickle.loads(pickle.dumps((params, optimizer)))
    run(params, optimizer, range(2, 4))
    for twins, twin in copies:
        run(twins, twin, range(2, 4))
        assert same(params, twins)


# -- nothing is lost for being small --------------------------------------------------------------------------------
def anchored(state_bits: int, first: float, then: float, anchor: float, steps: int, n: int = 1 << 14) -> LowBitAdamW:
    """Gradients of `first`, afterwards of `then`, but one value in 64 goes on with `anchor` and holds up the scales."""
    p = nn.Parameter(torch.zeros(n))
    optimizer = LowBitAdamW([p], lr=0.0, state_bits=state_bits)
    anchors = torch.arange(n) % 64 == 0
    for step in range(steps):
        p.grad = torch.where(anchors, anchor if step else 1.0, then if step else first)
        optimizer.step()
    state = optimizer.state[p]
    optimizer.others = [moment[~anchors] for moment in states.moments(state, n)]
    return optimizer


@pytest.mark.parametrize("state_bits", [4, 8])
@pytest.mark.parametrize("first", [0.7, 0.5, 0.35, 0.2])
def test_second_moment_decays_as_it_should(state_bits: int, first: float) -> None:
    """By 0.05 % of its root a step, a thousandth of a code: rounded to nearest anywhere on its way it would stand."""
    _, v = anchored(state_bits, first, 0.0, math.sqrt(1e-3), steps=401).others
    root = v.sqrt().mean().item()  # it is the root whose rounding is exact in the mean
    assert root == pytest.approx(first * math.sqrt(1e-3 * 0.999**400), rel=0.01)


@pytest.mark.parametrize("state_bits", [4, 8])
def test_small_gradients_reach_the_first_moment(state_bits: int) -> None:
    """A thousandth of the block's largest, a 140th of a 4-bit code."""
    m, _ = anchored(state_bits, 1e-3, 1e-3, 1.0, steps=60, n=1 << 17).others
    assert m.mean().item() == pytest.approx(1e-3, rel=0.25 if state_bits == 4 else 0.05)


@pytest.mark.parametrize(("state_bits", "share"), [(4, 5e-4), (8, 1e-6)])
def test_updates_stay_small_where_a_block_is_uneven(state_bits: int, share: float) -> None:
    """Values of one block whose gradients differ by factors of e and more: a small m must not meet a tiny root.

    With fp32 states no update of this run exceeds 1.4 learning rates. With codes of even steps for m one in a hundred
    exceeded 5, and with roots down to 1/63,000 in 8 bits they reached hundreds.
    """
    gen = torch.Generator().manual_seed(0)
    scale = torch.exp(torch.randn(1 << 14, generator=gen))
    p = nn.Parameter(torch.zeros(1 << 14))
    optimizer = LowBitAdamW([p], lr=1.0, weight_decay=0.0, state_bits=state_bits)
    moved = []
    for _ in range(300):
        before = p.detach().clone()
        p.grad = scale * (torch.randn(p.shape, generator=gen) + 0.3)
        optimizer.step()
        moved.append((before - p.detach()).flatten())
    updates = torch.stack(moved[100:])
    assert (updates.abs() > 5).double().mean() < share
    assert updates.mean().item() == pytest.approx(0.28, rel=0.1)  # fp32: 0.28
    assert updates.square().mean().sqrt() < 0.6  # fp32: 0.36; with even steps 1.0


@pytest.mark.parametrize("n", [4096 + 255, 4096 + 129, 4096 + 1])
@pytest.mark.parametrize("state_bits", [4, 8])
def test_the_padding_of_a_tail_is_zero(n: int, state_bits: int) -> None:
    p = nn.Parameter(torch.zeros(n))
    optimizer = LowBitAdamW([p], lr=0.0, state_bits=state_bits)
    for step in range(20):
        p.grad = torch.full((n,), 0.0 if step else 1.0)
        optimizer.step()
    scales = optimizer.state[p]["m_scale"]
    assert scales[0].item() == pytest.approx(0.1 * 0.9**19, rel=1e-5)
    assert torch.all(scales == scales[0])


# -- gradients that are not finite ----------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_checked_step_is_skipped_whole(bad: float) -> None:
    params = parameters(torch.bfloat16)
    optimizer = LowBitAdamW(params, check_finite=True, max_skipped_steps=3)
    run(params, optimizer, range(2))
    before, kept = [p.detach().clone() for p in params], saved(optimizer)
    for number in (1, 2):
        give_gradients(params, 7)
        params[1].grad[17] = bad
        optimizer.step()
        assert (optimizer.skipped_steps, optimizer.skipped_in_a_row) == (number, number)
    assert same(params, before)
    assert str(kept) == str(saved(optimizer))
    run(params, optimizer, range(2, 3))
    assert optimizer.skipped_in_a_row == 0
    give_gradients(params, 7)
    params[1].grad[17] = bad
    optimizer.step()
    optimizer.step()
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        optimizer.step()


def test_huge_gradients_are_finite() -> None:
    p = nn.Parameter(torch.zeros(8))
    optimizer = LowBitAdamW([p], check_finite=True)
    p.grad = torch.full((8,), 3e38)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    half = nn.Parameter(torch.zeros(5000, dtype=torch.float16))
    optimizer = LowBitAdamW([half], check_finite=True)
    half.grad = torch.full((5000,), 60000.0, dtype=torch.float16)
    optimizer.step()
    assert optimizer.skipped_steps == 0


def test_caller_says_not_finite() -> None:
    params = parameters()
    optimizer = LowBitAdamW(params)
    give_gradients(params, 0)
    optimizer.scale_gradients(1.0, finite=False)
    optimizer.step()
    assert same(params, parameters())
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("state_bits", [4, 8, 32])
def test_unchecked_step_keeps_bad_blocks(state_bits: int) -> None:
    p = nn.Parameter(torch.randn(4096).bfloat16())
    optimizer = LowBitAdamW([p], state_bits=state_bits)
    run([p], optimizer, range(1))
    before = p.detach().clone()
    give_gradients([p], 5)
    p.grad[1000] = float("nan")
    optimizer.step()
    block = {4: slice(896, 1024)}.get(state_bits, slice(768, 1024))
    assert torch.equal(p[block], before[block])
    assert p.isfinite().all()
    assert not torch.equal(p[:256], before[:256])
    assert optimizer.skipped_blocks == 1


# -- bad input ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"state_bits": 3}, "state_bits is 3"),
        ({"master_bits": 8}, "master_bits is 8"),
        ({"threads": 0}, "threads is 0"),
        ({"maximize": True}, "maximize"),
        ({"staging_bytes": 0}, "staging_bytes"),
        ({"threads": "4"}, "threads is '4'"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**80}, "seed is"),
        ({"max_skipped_steps": 0}, "max_skipped_steps is 0"),
        ({"state_bits": 4.0}, "state_bits is 4.0"),
        ({"state_bits": "4"}, "state_bits is '4'"),
        ({"param_bits": {"weight": 8}}, "key 'weight'"),
        ({"param_bits": {torch.zeros(3): 5}}, "has 5 for a parameter of shape"),
    ],
)
def test_bad_options(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LowBitAdamW(parameters(), **options)


def test_bad_dtypes() -> None:
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(TypeError, match=str(dtype)):
            LowBitAdamW([("layer.weight", nn.Parameter(torch.zeros(3, dtype=dtype)))])


def test_sparse_gradient_is_refused_by_name() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    other = nn.Parameter(torch.ones(3))
    optimizer = LowBitAdamW([("other", other), ("embedding.weight", embedding.weight)])
    (embedding(torch.tensor([1])).sum() + other.sum()).backward()
    with pytest.raises(TypeError, match=r"embedding\.weight.*sparse"):
        optimizer.step()
    assert torch.equal(other, torch.ones(3))


def test_param_bits_rule() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(100, 64),
            "linear": nn.Linear(64, 8192),
            "norm": nn.LayerNorm(8192),
        }
    )
    bits = param_bits(model, 4)
    found = {name: bits[p] for name, p in model.named_parameters()}
    assert found == {"embed.weight": 8, "linear.weight": 4, "linear.bias": 32, "norm.weight": 32, "norm.bias": 32}
    assert set(param_bits(model, 32).values()) == {32}
