"""Updates that go on after the step has returned: in order, waited for by whoever reads, and never lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from test_attachment import LateLink
from torch import nn

from hf_lowmem import LowBitAdamW, LowMemConfig, attach, attachment
from hf_lowmem.kernels import native
from hf_lowmem.late import LateUpdates
from hf_lowmem.overlap import overlap
from hf_lowmem.shelf import PASSING


def test_jobs_are_done_in_order_and_waited_for() -> None:
    late, done, go = LateUpdates(), [], threading.Event()
    late.wait()
    late.add(3, lambda ending: (go.wait(), done.append(3)))
    late.add(1, lambda ending: done.append(1))
    late.add(2, lambda ending: done.append(2))
    assert not late.done(1)
    assert late.done(7)
    assert [late.state(n) for n in (3, 1, 2, 7)] == ["running", "waiting", "waiting", "done"]
    go.set()
    late.wait(1)
    assert done[:2] == [3, 1]
    late.wait()
    assert done == [3, 1, 2]
    assert late.done(2)


def test_a_job_begins_when_the_one_before_it_is_ending() -> None:
    late, go, begun = LateUpdates(), threading.Event(), threading.Event()
    late.add(0, lambda ending: (ending(), ending(), begun.wait(10), go.wait(10)))  # saying so twice is no harm
    late.add(1, lambda ending: (begun.set(), go.wait(10)))
    late.add(2, lambda ending: None)
    assert begun.wait(10)
    assert [late.state(n) for n in range(3)] == ["running", "running", "waiting"]
    assert late.take(2)
    assert not late.take(2)
    assert not late.take(1)
    assert late.state(2) == "done"
    go.set()
    late.wait()


def test_an_error_is_raised_once_and_stops_no_other() -> None:
    late, done = LateUpdates(), []
    late.add(0, lambda ending: 1 / 0)
    late.add(1, lambda ending: (ending(), 1 / 0))
    late.add(2, lambda ending: done.append(2))
    late.wait(2)
    with pytest.raises(ZeroDivisionError):
        late.wait()
    late.wait()
    assert done == [2]


def test_nobody_waits_for_what_no_thread_will_do(monkeypatch) -> None:
    """At the interpreter's end its threads take no more."""
    late, go = LateUpdates(), threading.Event()
    late.add(0, lambda ending: go.wait(10))
    late.add(1, lambda ending: None)
    late.add(2, lambda ending: None)
    late._threads.shutdown(wait=False)
    go.set()
    for number in (1, 2):
        with pytest.raises(RuntimeError, match="after shutdown"):
            late.wait(number)
    late.wait()


@pytest.mark.parametrize("given", [False, True])
def test_ctrl_c_while_a_job_is_given_to_a_thread(monkeypatch, given) -> None:
    """Whether the thread has it already or not, it is done once, by it or by nobody."""
    late, done = LateUpdates(), []
    late.add(0, lambda ending: done.append(0))
    late.wait()
    submit = late._threads.submit

    def interrupted(*args):
        monkeypatch.setattr(late._threads, "submit", submit)
        if given:
            submit(*args).result()
        raise KeyboardInterrupt

    monkeypatch.setattr(late._threads, "submit", interrupted)
    if given:
        monkeypatch.setattr(late, "_lock", NoLock())  # the thread's turn comes within ours
    with pytest.raises(KeyboardInterrupt):
        late.add(1, lambda ending: done.append(1))
    late.wait()
    assert done == [0, 1]
    assert late.done(1)


class NoLock:
    def __enter__(self): ...
    def __exit__(self, *args): ...


def test_who_is_in_a_hurry_comes_first() -> None:
    late, done, go = LateUpdates(), [], threading.Event()
    late.add(0, lambda ending: go.wait(10))
    for number in (1, 2, 3):
        late.add(number, lambda ending, number=number: done.append(number))
    late.hurry(3)
    late.hurry(7)
    late.hurry(0)
    go.set()
    late.wait()
    assert done == [3, 1, 2]


class Slow:
    """The kernel, some time later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = threading.Event()
        self.go = threading.Event()
        self.step = native.adam_step
        monkeypatch.setattr(native, "adam_step", self)

    def __call__(self, tensors, threads=None, ending=None):
        if threading.current_thread() is not threading.main_thread():
            self.running.set()
            assert self.go.wait(10)
        return self.step(tensors, threads, ending)


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(96, 96) for _ in range(4)])


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(x).square().mean().backward()


@pytest.mark.parametrize("state_bits", [4, 32])
def test_deferred_is_undeferred(state_bits) -> None:
    models = [stack(), stack()]
    optimizers = [LowBitAdamW(m.parameters(), lr=1e-2, state_bits=state_bits, seed=3) for m in models]
    optimizers[1].defer([list(layer.parameters()) for layer in models[1][:3]])
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            optimizer.scale_gradients(0.5)
            optimizer.step()
            for group in optimizer.param_groups:  # as a scheduler does, while updates are under way
                group["lr"] *= 0.5
            optimizer.synchronize()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    one, other = (optimizer.state_dict() for optimizer in optimizers)
    for key, state in one["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][key][name]))


@pytest.mark.parametrize("reader", ["state_dict", "load_state_dict", "synchronize", "step", "wait", "pickle"])
def test_readers_wait(monkeypatch, reader) -> None:
    import pickle

    model = stack()
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.defer([list(model.parameters())])
    slow = Slow(monkeypatch)
    backward(model, 1)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert slow.running.wait(10)
    assert torch.equal(model[0].weight, before)
    assert not optimizer.done(0)
    threading.Timer(0.05, slow.go.set).start()
    {
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "synchronize": optimizer.synchronize,
        "step": optimizer.step,
        "wait": lambda: optimizer.wait(0),
        "pickle": lambda: pickle.dumps(optimizer),
    }[reader]()
    assert slow.go.is_set()
    assert not torch.equal(model[0].weight, before)


def test_a_failed_update_is_heard_of(monkeypatch) -> None:
    model = stack()
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2)
    optimizer.defer([list(model.parameters())])
    backward(model, 0)

    def broken(tensors, threads=None, ending=None):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(native, "adam_step", broken)
    optimizer.step()
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.synchronize()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(list(stack()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("reader", ["forward", "state_dict", "block's state_dict", "load_state_dict", "go_home"])
def test_readers_of_a_streamed_model_wait(monkeypatch, reader) -> None:
    model = Chain()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2)
    overlap(streamer, optimizer)
    x = torch.randn(5, 96)
    model(x).square().mean().backward()
    saved = {name: p.clone() for name, p in model.state_dict().items()}
    slow = Slow(monkeypatch)
    optimizer.step()
    assert slow.running.wait(10)
    threading.Timer(0.05, slow.go.set).start()
    started = time.perf_counter()
    {
        "forward": lambda: model(x),
        "state_dict": model.state_dict,
        "block's state_dict": model.blocks[2].state_dict,
        "load_state_dict": lambda: model.load_state_dict(saved),
        "go_home": streamer.go_home,
    }[reader]()
    assert time.perf_counter() - started > 0.03
    if reader == "forward":
        assert all(optimizer.done(number) for number in range(4))
    optimizer.synchronize()
    same = [torch.equal(p, saved[name]) for name, p in model.named_parameters()]
    assert all(same) if reader == "load_state_dict" else not any(same)


def test_a_forward_starts_before_the_last_update_is_done(monkeypatch) -> None:
    """Block 0 is computed while block 3 is being updated."""
    model = Chain()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2)
    overlap(streamer, optimizer)
    x = torch.randn(5, 96)
    model(x).square().mean().backward()
    step, go, seen = native.adam_step, threading.Event(), []

    def last_one_waits(tensors, threads=None, ending=None):
        seen.append(len(seen))
        if len(seen) == 4:
            assert go.wait(10)
        return step(tensors, threads, ending)

    monkeypatch.setattr(native, "adam_step", last_one_waits)
    optimizer.step()
    reached = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *args, i=i: (reached.append(i), go.set() if i == 2 else None)[1])
    model(x)
    assert reached == [0, 1, 2, 3]
    assert go.is_set()


def early_model() -> tuple[Chain, LowBitAdamW, object]:
    model = Chain()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2)
    overlap(streamer, optimizer)
    streamer.early = True
    return model, optimizer, streamer


def test_early_updates_begin_in_backward_and_keep_no_gradients(monkeypatch) -> None:
    model, optimizer, streamer = early_model()
    reference = Chain()
    plain = LowBitAdamW(reference.parameters(), lr=1e-2)
    step, order = native.adam_step, []

    def noted(tensors, threads=None, ending=None):
        order.append("update")
        return step(tensors, threads, ending)

    for i, block in enumerate(model.blocks):
        block.register_full_backward_hook(lambda *args, i=i: (order.append(i), time.sleep(0.02))[1])
    for seed in range(3):
        x = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed))
        order.clear()
        monkeypatch.setattr(native, "adam_step", noted)
        model(x.requires_grad_()).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        assert order.index("update") < order.index(
            0
        )  # the last block is updated before the first one's gradient is there
        assert set(streamer.early_norms) == set(model.parameters())
        optimizer.step()
        monkeypatch.setattr(native, "adam_step", step)
        plain.zero_grad()
        reference(x.detach()).square().mean().backward()
        for p, twin in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(streamer.early_norms[p], torch._foreach_norm([twin.grad])[0])
        plain.step()
    optimizer.synchronize()
    for p, twin in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, twin)
    assert streamer.shelf._gradients == [None] * 4
    assert {state["step"] for state in optimizer.state.values()} == {3}


class Repeated(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1, 0, 2, 1):
            x = self.blocks[i](x)
        return x


def test_blocks_used_several_times_are_updated_once() -> None:
    reference, model = Repeated(), Repeated()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    optimizers = [LowBitAdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    overlap(streamer, optimizers[1])
    streamer.early = True
    for seed in range(3):
        x = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed))
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    optimizers[1].synchronize()
    for p, twin in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, twin)


def test_what_fails_early_is_heard_of_and_blocks_nobody(monkeypatch) -> None:
    model, optimizer, streamer = early_model()
    step = native.adam_step

    def broken(tensors, threads=None, ending=None):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(native, "adam_step", broken)
    x = torch.randn(5, 96)
    model(x).square().mean().backward()
    monkeypatch.setattr(native, "adam_step", step)
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.synchronize()
    streamer.go_home()
    for _ in range(3):  # the places that gradients pass through are free again
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("seed", range(4))
def test_early_updates_wait_for_gradients_that_come_late(monkeypatch, seed) -> None:
    monkeypatch.setattr(attachment, "HostLink", lambda: LateLink(seed))
    model, optimizer, _ = early_model()
    reference = Chain()
    plain = LowBitAdamW(reference.parameters(), lr=1e-2)
    for step in range(5):
        x = torch.randn(5, 96, generator=torch.Generator().manual_seed(step))
        for m, o in ((model, optimizer), (reference, plain)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
    optimizer.synchronize()
    for p, twin in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, twin)


def test_an_update_that_is_refused_keeps_no_place(monkeypatch) -> None:
    """More refusals than there are places for gradients to pass through; then it goes on."""
    model, optimizer, streamer = early_model()

    def refuse(*args):
        raise RuntimeError("on purpose")

    x = torch.randn(5, 96)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "update", refuse)
        for _ in range(PASSING + 2):
            with pytest.raises(RuntimeError, match="on purpose"):
                model(x).square().mean().backward()
            streamer.go_home()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.synchronize()
