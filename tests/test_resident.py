"""Parameters whose states stay on their device: the bits of the same parameters in RAM.

Without a GPU Triton's interpreter runs the kernel on parameters in RAM; on one (mark ``gpu``) they are on it.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from kernels.test_triton_adam import fused  # noqa: F401 - a fixture

from hf_lowmem.optim import LowBitAdamW
from hf_lowmem.resident import _goes_wrong, kinds_of, why_not

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, of the interpreter
if ON_GPU:
    pytestmark.append(pytest.mark.gpu)


def make(dtype: torch.dtype, **options) -> tuple[list[nn.Parameter], LowBitAdamW]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((80, 70), (10,), (4100,), ())]
    return params, LowBitAdamW(params, lr=1e-2, seed=5, **options)


def resident(dtype: torch.dtype, **options) -> tuple[list[nn.Parameter], LowBitAdamW]:
    params, _ = make(dtype)
    params = [nn.Parameter(p.detach().to(DEVICE)) for p in params]
    optimizer = LowBitAdamW(params, lr=1e-2, seed=5, **options)
    optimizer.keep_on_device(params)
    return params, optimizer


def step(params: list[nn.Parameter], optimizer: LowBitAdamW, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)
    optimizer.scale_gradients(0.5)
    optimizer.step()


def assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.detach().cpu(), other.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_bits", [4, 8, 32])
@pytest.mark.parametrize("master_bits", [16, 24, 32])
def test_same_bits_as_in_ram(dtype, state_bits, master_bits) -> None:
    options = {"state_bits": state_bits, "master_bits": master_bits}
    (params, optimizer), (twins, twin) = resident(dtype, **options), make(dtype, **options)
    for number in range(3):
        step(params, optimizer, number)
        step(twins, twin, number)
    assert_same(params, twins)
    for p in params:
        held = [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
        if dtype is torch.float32 or master_bits != 32:
            assert {v.device.type for v in held} == {DEVICE}
    one, other = optimizer.state_dict()["state"], twin.state_dict()["state"]
    for key, state in other.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(one[key][name]), torch.as_tensor(value)), name
            assert torch.as_tensor(one[key][name]).device.type == "cpu"


def test_resumed_in_ram_and_back() -> None:
    (params, optimizer), (twins, twin) = resident(torch.bfloat16), make(torch.bfloat16)
    for number in range(2):
        step(params, optimizer, number)
        step(twins, twin, number)
    saved = optimizer.state_dict()
    optimizer.keep_on_device([])
    optimizer.load_state_dict(saved)
    step(params, optimizer, 2)
    step(twins, twin, 2)
    assert_same(params, twins)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.keep_on_device(params)
    step(params, optimizer, 3)
    step(twins, twin, 3)
    assert_same(params, twins)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("launched", [1, 64])
def test_pieces_of_one_tensor_keep_their_masters(monkeypatch, launched) -> None:
    """They share torch's counter of writes, also over several launches and with one that is updated in RAM."""
    monkeypatch.setattr("hf_lowmem.resident.LAUNCHED", launched)

    def train(pieces: bool) -> list[torch.Tensor]:
        flat = torch.ones(3, 4100, dtype=torch.bfloat16, device=DEVICE)
        params = [nn.Parameter(piece if pieces else piece.clone()) for piece in flat]
        optimizer = LowBitAdamW(params, lr=1e-4, weight_decay=0.0)
        optimizer.keep_on_device(params[:2])
        for _ in range(12):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        optimizer.synchronize()
        return [p.detach().cpu() for p in params] + [optimizer.state[p]["extension"].cpu() for p in params]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


def test_states_move_at_once(monkeypatch) -> None:
    """Or else whoever decides by the device's memory what else has room there would not see them."""
    params, optimizer = resident(torch.bfloat16)
    twins, twin = make(torch.bfloat16)
    for number in range(2):
        step(params, optimizer, number)
        step(twins, twin, number)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    held = [v for p in params for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    assert {v.device.type for v in held} == {"cpu"}
    optimizer.keep_on_device(params)
    held = [v for p in params for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    assert {v.device.type for v in held} == {DEVICE}
    step(params, optimizer, 2)
    step(twins, twin, 2)
    assert_same(params, twins)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_weight_that_was_written_has_lost_its_master(through_data) -> None:
    params, optimizer = resident(torch.bfloat16)
    step(params, optimizer, 0)
    assert optimizer.state[params[0]]["extension"].any()
    kept = optimizer.state[params[2]]["extension"].clone()
    with torch.no_grad():
        (params[0].data if through_data else params[0]).fill_(0.5)
    for p in params:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    if not through_data:  # which nobody sees: the master is the weight but for half of its last place
        assert not optimizer.state[params[0]]["extension"].any()
    assert torch.equal(params[0].detach(), torch.full_like(params[0], 0.5))
    # the other's master is kept: rounded anew, by no more than its last place
    assert (optimizer.state[params[2]]["extension"].int() - kept.int()).abs().max() <= 1


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize(
    ("dtype", "extended"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True), (torch.float32, False)],
)
def test_a_device_is_tried_before_it_is_used(dtype, extended, bits) -> None:
    for grad_dtype in {dtype, torch.float32}:
        assert why_not(torch.device(DEVICE), frozenset([(dtype, bits, extended, grad_dtype)])) is None


def test_a_kernel_that_computes_other_bits_is_not_used(monkeypatch) -> None:
    from hf_lowmem.kernels import triton_adam

    step = triton_adam.adam_step

    def wrong(tensors):
        skipped = step(tensors)
        tensors[0].v[5] ^= 1
        return skipped

    monkeypatch.setattr(triton_adam, "adam_step", wrong)
    _goes_wrong.cache_clear()
    kinds = frozenset([(torch.bfloat16, 4, True, torch.bfloat16)])
    assert "it computes other bits than it should" in why_not(torch.device(DEVICE), kinds)
    monkeypatch.setattr(triton_adam, "adam_step", lambda tensors: 1 / 0)
    _goes_wrong.cache_clear()
    assert why_not(torch.device(DEVICE), kinds) == "ZeroDivisionError: division by zero"
    _goes_wrong.cache_clear()


def test_kinds() -> None:
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    widths = dict(zip(params, [(4, 24), (32, None), (8, 32)], strict=True))
    bf16, fp32 = torch.bfloat16, torch.float32
    assert kinds_of(widths) == {(bf16, 4, True, bf16), (fp32, 32, False, fp32)}
    params[0].grad_dtype = fp32
    assert kinds_of(widths) == {(bf16, 4, True, fp32), (fp32, 32, False, fp32)}


def test_blocks_left_alone_are_counted() -> None:
    params, optimizer = resident(torch.bfloat16)
    for p in params:
        p.grad = torch.ones_like(p)
    params[0].grad[0, 0] = float("nan")
    before = params[0].detach().clone()
    optimizer.step()
    assert optimizer.skipped_blocks == 1
    assert torch.equal(params[0].detach().view(-1)[:128], before.view(-1)[:128])
    assert not torch.equal(params[0].detach(), before)


def test_what_cannot_stay_is_stepped_in_ram() -> None:
    """A transposed weight, and a group with 32-bit masters."""
    torch.manual_seed(0)
    weights = [torch.randn(80, 70).bfloat16(), torch.randn(90, 60).bfloat16()]
    runs = []
    for stays in (False, True):
        p, q = nn.Parameter(weights[0].clone().t().to(DEVICE)), nn.Parameter(weights[1].clone().to(DEVICE))
        optimizer = LowBitAdamW([{"params": [p]}, {"params": [q], "master_bits": 32}], lr=1e-2)
        if stays:
            optimizer.keep_on_device([p, q])
        step([p, q], optimizer, 0)
        runs.append([nn.Parameter(x.detach().cpu()) for x in (p, q)])
    assert_same(*runs)
