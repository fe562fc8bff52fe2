"""Parameters on a GPU: the same bits as on the CPU, whatever the order in which gradients come down.

What needs a GPU is marked; docs/compatibility.md says where it ran. The ring of slots itself is also tested without
one, on streams that do at once what they are told.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from at_once import AtOnce
from torch import nn

from hf_lowmem import memory, staging
from hf_lowmem.memory import PinnedArena
from hf_lowmem.optim import LowBitAdamW

gpu = pytest.mark.gpu
SHAPES = [(300, 700), (40_000,), (5,), (), (64, 4096), (129, 257)]
RECIPES = [(4, 24), (4, 16), (4, 32), (8, 24), (32, 24)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches and only two slots, so that every path of the ring is walked."""
    monkeypatch.setattr(staging, "PIECE", 2**16)


def pair(dtype: torch.dtype) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    gen = torch.Generator().manual_seed(0)
    host = [nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for shape in SHAPES]
    return host, [nn.Parameter(p.detach().cuda()) for p in host]


def give_gradients(host: list[nn.Parameter], device: list[nn.Parameter], seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    for p, q in zip(host, device, strict=True):
        p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)
        q.grad = p.grad.cuda()


def assert_same(host: list[nn.Parameter], device: list[nn.Parameter]) -> None:
    for p, q in zip(host, device, strict=True):
        assert torch.equal(p, q.cpu()), tuple(p.shape)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("state_bits", "master_bits"), RECIPES)
def test_gpu_equals_cpu(small_pieces: None, dtype: torch.dtype, state_bits: int, master_bits: int) -> None:
    host, device = pair(dtype)
    options = {"lr": 1e-2, "state_bits": state_bits, "master_bits": master_bits, "staging_bytes": 1}
    a, b = LowBitAdamW(host, **options), LowBitAdamW(device, **options)
    for step in range(6):
        give_gradients(host, device, step)
        a.step()
        b.step()
    assert_same(host, device)
    for p, q in zip(host, device, strict=True):
        for key, value in a.state[p].items():
            assert torch.equal(value, b.state[q][key]) if isinstance(value, torch.Tensor) else value == b.state[q][key]


class Stack(nn.Module):
    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def twin_stacks() -> tuple[Stack, Stack]:
    torch.manual_seed(0)
    one, two = Stack().cuda().bfloat16(), Stack().cuda().bfloat16()
    two.load_state_dict(one.state_dict())
    return one, two


def backward(model: Stack, step: int, micro_batches: int = 1) -> None:
    gen = torch.Generator("cuda").manual_seed(step)
    for _ in range(micro_batches):
        model(
            torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, generator=gen)
        ).float().square().mean().backward()


@gpu
@pytest.mark.parametrize("staging_bytes", [1, 2**20, 2**30])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip", ["no", "in place", "by scale", "behind the version counter"])
def test_gradients_that_came_down_early(small_pieces: None, staging_bytes: int, micro_batches: int, clip: str) -> None:
    """Against the same optimizer fed from host copies: what was copied during backward must be what the step uses."""
    model, twin = twin_stacks()
    optimizer = LowBitAdamW(model.parameters(), lr=1e-3, staging_bytes=staging_bytes)
    mirror = [nn.Parameter(p.detach().cpu()) for p in twin.parameters()]
    reference = LowBitAdamW(mirror, lr=1e-3)
    for step in range(6):
        for m, o in ((model, optimizer), (twin, None)):
            m.zero_grad()
            backward(m, step, micro_batches)
            if clip == "in place":
                nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
            if clip == "behind the version counter":
                for p in m.parameters():
                    p.grad.data.mul_(0.5)
            if o is not None:
                if clip == "by scale":
                    o.scale_gradients(0.25)
                o.step()
        for p, q in zip(mirror, twin.parameters(), strict=True):
            p.grad = q.grad.cpu()
        if clip == "by scale":
            reference.scale_gradients(0.25)
        reference.step()
        with torch.no_grad():
            for p, q in zip(mirror, twin.parameters(), strict=True):
                q.copy_(p)
        assert_same(mirror, list(model.parameters()))


@gpu
def test_early_copies_are_given_up_where_they_are_wasted(small_pieces: None) -> None:
    model, _ = twin_stacks()
    optimizer = LowBitAdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        model.zero_grad()
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    ((_, ring),) = optimizer._host.stagings._known.values()
    backward(model, 9)
    assert not ring._came_down


@gpu
def test_gpu_holds_no_states(small_pieces: None) -> None:
    p = nn.Parameter(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.randn_like(p)
    optimizer = LowBitAdamW([p], staging_bytes=2**20)
    optimizer.step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    assert grown <= 2**16  # the sums of bits; the weight takes 32 MiB, 4-bit states would take 17


@gpu
def test_resume_on_gpu(small_pieces: None) -> None:
    model, twin = twin_stacks()
    straight = LowBitAdamW(model.parameters(), lr=1e-3)
    first = LowBitAdamW(twin.parameters(), lr=1e-3)
    for step in range(3):
        for m, o in ((model, straight), (twin, first)):
            m.zero_grad()
            backward(m, step)
            o.step()
    second = LowBitAdamW(twin.parameters(), lr=1e-3)
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        for m, o in ((model, straight), (twin, second)):
            m.zero_grad()
            backward(m, step)
            o.step()
    assert_same([nn.Parameter(p.detach().cpu()) for p in model.parameters()], list(twin.parameters()))


@gpu
@pytest.mark.parametrize("master_bits", [24, 32])
def test_weight_written_on_the_gpu_is_taken_anew(small_pieces: None, master_bits: int) -> None:
    p = nn.Parameter(torch.randn(70_000, device="cuda").bfloat16())
    optimizer = LowBitAdamW([p], lr=0.0, weight_decay=0.0, master_bits=master_bits)
    p.grad = torch.ones_like(p)
    optimizer.step()
    new = torch.randn_like(p)
    with torch.no_grad():
        p.copy_(new)
    optimizer.step()
    assert torch.equal(p, new)


@gpu
def test_skipped_step_on_gpu(small_pieces: None) -> None:
    model, _ = twin_stacks()
    optimizer = LowBitAdamW(model.parameters(), lr=1e-3, check_finite=True)
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 3)
    next(iter(model.parameters())).grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    backward(model, 4)
    optimizer.step()
    assert not torch.equal(next(iter(model.parameters())), before[0])


@gpu
def test_host_and_gpu_parameters_together(small_pieces: None) -> None:
    host, device = pair(torch.bfloat16)
    mixed = [device[0], *host[1:3], *device[3:]]
    reference = [nn.Parameter(p.detach().cpu().clone()) for p in mixed]
    a, b = LowBitAdamW(mixed, lr=1e-2), LowBitAdamW(reference, lr=1e-2)
    for step in range(4):
        gen = torch.Generator().manual_seed(step)
        for p, q in zip(reference, mixed, strict=True):
            p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)
            q.grad = p.grad.to(q.device)
        a.step()
        b.step()
    assert_same(reference, mixed)


@gpu
def test_arena_is_pinned_at_its_exact_size_and_let_go() -> None:
    torch.zeros(1, device="cuda")
    sizes = [1000, 3 * 2**20 + 7, 0, 64]
    arena = PinnedArena(sizes)
    assert arena.pinned
    assert [len(part) for part in arena.parts] == sizes
    assert all(part.data_ptr() % 256 == 0 for part in arena.parts)
    assert arena.nbytes < sum(sizes) + 256 * len(sizes)
    parts = arena.parts
    with pytest.warns(RuntimeWarning, match="CUDA error 712"):  # it is registered already
        assert not memory._register(parts[0], 0, 4096)
    assert torch.ones(10, device="cuda").sum() == 10  # and nobody else hears of the refusal
    del arena
    gc.collect()
    assert memory._register(parts[0], 0, 4096)
    torch.cuda.cudart().cudaHostUnregister(parts[0].data_ptr())


# -- the ring, without a GPU ----------------------------------------------------------------------------------------
@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, AtOnce)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(memory, "_register", lambda base, start, nbytes: False)
    monkeypatch.setattr(staging, "PIECE", 1024)


class Ring:
    """Parameters whose step adds the gradient to the home weight, and what their weights ought to be."""

    def __init__(self, nbytes: int, fail_at: int | None = None) -> None:
        self.params = [nn.Parameter(torch.randn(n)) for n in (10, 3000, 1, 1024, 700, 2500)]
        self.home = {p: p.detach().clone() for p in self.params}
        self.wanted = [p.detach().clone() for p in self.params]
        self.staging = staging.Staging(torch.device("cpu"), self.params, nbytes)
        self.fetched = 0
        self.fail_at = fail_at
        fetch = self.staging._fetch

        def counted(batch: staging.Batch, piece: staging.Piece) -> None:
            self.fetched += piece.stop - piece.start
            fetch(batch, piece)

        self.staging._fetch = counted  # type: ignore[method-assign]

    def backward(self, times: int = 1, without: int | None = None) -> None:
        for _ in range(times):
            used = [p for i, p in enumerate(self.params) if i != without]
            sum((p * torch.randn_like(p)).sum() for p in used).backward()

    def update(self, tensors: list) -> int:
        for p, start, stop, grad in tensors:
            if self.fail_at is not None:
                raise RuntimeError("as told")
            self.home[p][start:stop] += grad
        return len(tensors)

    def step(self) -> None:
        present = [p for p in self.params if p.grad is not None]
        for p, wanted in zip(self.params, self.wanted, strict=True):
            if p.grad is not None:
                wanted += p.grad
        self.staging.step(present, lambda p, a, b, g: (p, a, b, g.clone()), self.update, self.home.__getitem__)

    def check(self) -> None:
        for p, wanted in zip(self.params, self.wanted, strict=True):
            assert torch.equal(p.detach(), wanted)
        assert len(self.staging._free) == len(self.staging.arena.parts)
        for p in self.params:
            p.grad = None


VALUES = 10 + 3000 + 1 + 1024 + 700 + 2500


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("nbytes", [1, 20_000, 10**9])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("change", ["none", "in place", "behind the version counter", "a new gradient"])
def test_ring_uses_the_gradients_of_the_step(nbytes: int, micro_batches: int, change: str) -> None:
    ring = Ring(nbytes)
    for _ in range(5):
        ring.backward(micro_batches)
        for p in ring.params[::2]:
            if change == "in place":
                p.grad.mul_(0.5)
            elif change == "behind the version counter":
                p.grad.data.mul_(0.5)
            elif change == "a new gradient":
                p.grad = p.grad + 1
        ring.step()
        ring.check()


@pytest.mark.usefixtures("at_once")
def test_ring_sees_a_change_that_leaves_the_sum_as_it_was() -> None:
    """What GradScaler's unscaling does, to gradients that add up to nothing."""
    ring = Ring(10**9)
    for p in ring.params[1:2]:
        p.grad = torch.cat([torch.full((1500,), 65536.0), torch.full((1500,), -65536.0)])
        ring.staging._on_gradient(p)
        p.grad.data.div_(65536.0)
    ring.step()
    ring.check()


@pytest.mark.usefixtures("at_once")
def test_ring_goes_with_its_optimizer() -> None:
    ring = Ring(10**9)
    gone, params = weakref.ref(ring.staging), ring.params
    del ring
    gc.collect()
    assert gone() is None
    params[0].sum().backward()  # the hooks are gone with it
    assert not params[0]._post_accumulate_grad_hooks


@pytest.mark.usefixtures("at_once")
def test_ring_fetches_once_what_came_early() -> None:
    ring = Ring(10**9)
    ring.backward()
    assert ring.fetched == VALUES
    ring.step()
    assert ring.fetched == VALUES
    ring.check()


@pytest.mark.usefixtures("at_once")
def test_ring_gives_up_early_copies_that_are_wasted() -> None:
    ring = Ring(10**9)
    for step in range(4):
        ring.fetched = 0
        ring.backward()
        for p in ring.params:
            p.grad.mul_(0.5)
        ring.step()
        ring.check()
        assert ring.fetched == (2 * VALUES if step < staging.MISSES_ALLOWED else VALUES)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("nbytes", [1, 10**9])
def test_ring_without_some_gradients_and_after_a_dropped_step(nbytes: int) -> None:
    ring = Ring(nbytes)
    for without in (1, 5, 0, None):
        ring.backward(without=without)
        ring.step()
        ring.check()
        ring.backward()  # this step is skipped
        ring.staging.drop()
        ring.check()


@pytest.mark.usefixtures("at_once")
def test_ring_survives_a_step_that_failed() -> None:
    ring = Ring(1, fail_at=0)
    kept = [w.clone() for w in ring.wanted]
    ring.backward()
    with pytest.raises(RuntimeError, match="as told"):
        ring.step()
    ring.wanted, ring.fail_at = kept, None
    ring.check()
    ring.backward()
    ring.step()
    ring.check()


def test_refused_pinning_goes_on_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            return 2

    forgotten = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver)
    monkeypatch.setattr(memory, "_forget_error", lambda: forgotten.append(True))
    with pytest.warns(RuntimeWarning, match=r"refused to pin 0\.00 GiB.*CUDA error 2"):
        arena = PinnedArena([100])
    assert not arena.pinned
    assert forgotten
    arena.parts[0].fill_(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("numel", [0, 1, 5, 4096, 2**20 + 9])
def test_sum_of_bits_sees_every_value(dtype: torch.dtype, offset: int, numel: int) -> None:
    whole = torch.randn(offset + numel, dtype=dtype)
    x = whole[offset:]
    before = staging.sum_of_bits(x)
    assert before == staging.sum_of_bits(x)
    assert before.dtype is torch.int64
    for i in {0, numel // 2, numel - 1} if numel else ():
        old = x[i].clone()
        x[i] = old + 1
        assert staging.sum_of_bits(x) != before
        x[i] = old
    if numel == 4096:
        assert staging.sum_of_bits(x.view(64, 64).t()).dtype is torch.int64


def test_large_host_memory_is_aligned_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(memory, "_register", lambda base, start, nbytes: seen.append((base, start, nbytes)))
    sizes = [5 * 2**20 + 3, 100]
    arena = PinnedArena(sizes)
    ((base, start, nbytes),) = seen
    assert (base.data_ptr() + start) % memory.HUGE_PAGE == 0
    assert nbytes == arena.nbytes == 5 * 2**20 + 512
    for value, part in enumerate(arena.parts):
        part.fill_(value + 1)
    assert [part.long().sum().item() for part in arena.parts] == [sizes[0], 2 * sizes[1]]
    parts = arena.parts
    del arena, base
    seen.clear()
    gc.collect()
    assert parts[0][-1] == 1  # the tensors keep the mapping
