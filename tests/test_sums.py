"""Gradients of several micro-batches, added in 16 bits without a bias."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tiny_model import save_tiny_model
from torch import nn

from hf_lowmem import LowMemConfig, LowMemTrainer, attach, create_optimizer, load
from hf_lowmem import sums as module
from hf_lowmem.attachment import detach
from hf_lowmem.sums import StochasticSums, add_stochastic, forget_sums, sums_of

DTYPES = [torch.bfloat16, torch.float16]


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of a dtype on either side of fp64 ones."""
    nearest = x.to(dtype)
    up = torch.nextafter(nearest, torch.full_like(nearest, float("inf")))
    down = torch.nextafter(nearest, torch.full_like(nearest, -float("inf")))
    return torch.where(nearest.double() > x, down, nearest), torch.where(nearest.double() < x, up, nearest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_to_a_neighbour_and_exact_on_average(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(300, generator=generator).to(dtype)
    gradient = (torch.randn(300, generator=generator) * 0.003).to(dtype)
    exact = total.double() + gradient.double()
    down, up = neighbours(exact, dtype)
    mean = torch.zeros(300, dtype=torch.float64)
    for key in range(2000):
        found = add_stochastic(total, gradient, key * 0x9E3779B97F4A7C15 % 2**64)
        assert ((found == down) | (found == up)).all()
        mean += found.double() / 2000
    step = (up.double() - down.double()).clamp_min(1e-12)
    assert ((mean - exact).abs() / step).max() < 0.06  # 5 times the deviation of 2,000 draws
    assert ((mean - exact) / step).mean().abs() < 0.004


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_the_same_bits_in_any_chunks_and_shapes(monkeypatch, dtype, n) -> None:
    a, b = (torch.randn(n).to(dtype) for _ in range(2))
    whole = add_stochastic(a, b, 5)
    assert torch.equal(add_stochastic(a.view(n, 1, 1), b.view(n, 1, 1), 5), whole.view(n, 1, 1))
    scattered = torch.zeros(n, 2, dtype=dtype)[:, 0].copy_(b)
    assert torch.equal(add_stochastic(a, scattered, 5), whole)
    monkeypatch.setattr(module, "CHUNK", 256)
    assert torch.equal(add_stochastic(a, b, 5), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype) -> None:
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0], dtype=dtype)
    for key in range(20):
        found = add_stochastic(values, torch.ones(4, dtype=dtype), key)
        assert found[0] == float("inf")
        assert found[1] == -float("inf")
        assert found[2].isnan()
        assert found[3] == 2
    assert add_stochastic(torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=dtype), 1).shape == (0,)


def micro_batches(model: nn.Module, count: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Runs them, and returns their exact sum."""
    exact: dict[str, torch.Tensor] = {}
    single = copy.deepcopy(model)
    forget_sums(single)
    for i in range(count):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
        single.zero_grad()
        for m in (single, model):
            (m(x).float().square().sum() * scale).backward()
        for name, p in single.named_parameters():
            exact[name] = exact.get(name, 0) + p.grad.double()
    return exact


def small(dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def test_small_gradients_count_beside_a_large_sum() -> None:
    """To nearest, 400 gradients of a thousandth of the first one leave nothing."""
    p, q = (nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(2))
    holder = nn.ParameterList([p])
    StochasticSums(holder)
    for x in [1.0, *[0.001] * 400]:
        for one in (p, q):
            (one * x).sum().backward()
    assert torch.equal(q.grad, torch.ones_like(q))
    assert (p.grad.float().mean() - 1.4).abs() < 0.02


def test_the_first_micro_batch_is_torchs_and_steps_differ() -> None:
    model, twin = small(), small()
    sums = StochasticSums(model)
    exact = micro_batches(model, 1)
    assert all(torch.equal(p.grad.double(), exact[name]) for name, p in model.named_parameters())
    sums_by_step = []
    for _ in range(3):
        model.zero_grad()
        micro_batches(model, 5)
        sums_by_step.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert not torch.equal(sums_by_step[0]["0.weight"], sums_by_step[1]["0.weight"])
    # By its number a step is the same again, in another process too, and with another seed it is not.
    again = StochasticSums(twin)
    for seed, same in ((0, True), (1, False)):
        for s, m in ((sums, model), (again, twin)):
            s.step, s.seed = 7, 0
            m.zero_grad()
        again.seed = seed
        micro_batches(model, 5)
        micro_batches(twin, 5)
        assert torch.equal(model[0].weight.grad, twin[0].weight.grad) == same


def test_hooks_of_others_see_each_gradient() -> None:
    model = small()
    StochasticSums(model)
    seen = []
    model[0].weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    exact = micro_batches(model, 3)
    total = sum(g.double() for g in seen)
    torch.testing.assert_close(total, exact["0.weight"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model[0].weight.grad.double(), 2 * total, rtol=0.02, atol=0.02)


def a_backward_that_fails(model: nn.Module) -> None:
    def fails(gradient):
        raise ValueError("of somebody")

    handle = model[0].weight.register_hook(fails)
    with pytest.raises(ValueError, match="of somebody"):
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    handle.remove()


def test_a_backward_that_fails_leaves_the_next_one_alone() -> None:
    model = small()
    StochasticSums(model)
    micro_batches(model, 2)
    a_backward_that_fails(model)
    model.zero_grad()
    exact = micro_batches(model, 1)
    assert all(torch.equal(p.grad.double(), exact[name]) for name, p in model.named_parameters())


def test_copied_pickled_and_taken_off() -> None:
    model = small()
    sums = StochasticSums(model)
    assert sums_of(nn.Sequential(model)) is sums
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.state_dict()))):
        assert other is not None
    forget_sums(model)
    assert sums_of(model) is None
    twin = small()
    micro_batches(model, 4)
    micro_batches(twin, 4)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    StochasticSums(model)
    ref = weakref.ref(model[0].weight)
    del model, sums
    gc.collect()
    assert ref() is None


def test_asking_for_gradients_adds_nothing_and_loses_nothing() -> None:
    """torch.autograd.grad between two micro-batches, and within one."""
    model, twin = small(), small()
    sums = StochasticSums(model)
    StochasticSums(twin)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    for number in range(3):
        for m in (model, twin):
            loss = m(x * (number + 1)).sum()
            if m is model:
                before = [None if p.grad is None else p.grad.clone() for p in m.parameters()]
                torch.autograd.grad(loss, list(m.parameters()), retain_graph=True)
                torch.autograd.grad(m(x).sum(), [m[0].weight])
                for p, grad in zip(m.parameters(), before, strict=True):
                    assert (p.grad is None) == (grad is None)
                    assert grad is None or torch.equal(p.grad, grad)
            loss.backward()
    assert not sums._before
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert error(p.grad, q.grad) < 0.02  # the same sums, though of other random bits
        assert p.grad.norm() > 1.5 * torch.autograd.grad(model(x).sum(), [p])[0].norm()


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def test_a_failed_backward_loses_nothing() -> None:
    model = small()
    StochasticSums(model)
    micro_batches(model, 3)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    a_backward_that_fails(model)
    exact = micro_batches(model, 1)
    assert error(model[0].weight.grad, before["0.weight"].double() + exact["0.weight"]) < 0.02


def test_a_model_is_freed(tiny, tmp_path) -> None:
    """Also by the reference counts alone: the garbage collector does not see into hooks."""
    for trained in (False, True):
        model = tiny.model(dtype="bfloat16")
        if trained:
            trainer = settings(tiny, tmp_path, "gradient_dtype=stochastic", model=model, max_steps=1)
            del trainer
        else:
            StochasticSums(model)
            tokens = tiny.data(1)[0]["input_ids"][None]
            for _ in range(2):
                model(input_ids=tokens, labels=tokens).loss.backward()
        refs = [weakref.ref(p) for p in model.parameters()]
        del model
        gc.collect()
        assert not any(ref() is not None for ref in refs), trained


def test_saved_whole_and_copied(tiny, tmp_path) -> None:
    """The copy adds as torch does, until a Trainer takes it."""
    model = settings(tiny, tmp_path, "gradient_dtype=stochastic", max_steps=1).model
    torch.save(model, tmp_path / "model.pt")
    for other in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert sums_of(other) is None
        again = settings(tiny, tmp_path, "gradient_dtype=stochastic", model=other, max_steps=1)
        assert sums_of(again.model) is not None


@pytest.mark.parametrize("first", ["model", "fp32", "stochastic"])
@pytest.mark.parametrize("then", ["model", "fp32", "stochastic", "auto"])
def test_the_next_training_adds_as_it_says(tiny, tmp_path, first, then) -> None:
    def train(how, model=None):
        return settings(tiny, tmp_path, f"gradient_dtype={how}", model=model, max_steps=2).model

    model = train(first)
    found = train(then, model)
    wide = {getattr(p, "grad_dtype", p.dtype) for p in found.parameters()}
    assert wide == {torch.float32 if then in ("fp32", "auto") else torch.bfloat16}
    assert (sums_of(found) is not None) == (then == "stochastic")
    other = train(then, copy.deepcopy(train(first)))
    assert tiny.equal_bits(tiny.weights(found), tiny.weights(other))


def test_what_others_have_set_stays(tiny, tmp_path) -> None:
    model = tiny.model(num_hidden_layers=3, dtype="bfloat16")
    if not hasattr(model.lm_head.weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    for p in model.parameters():
        p.grad_dtype = torch.float32
    settings(tiny, tmp_path, "gradient_dtype=model", model=model, max_steps=1)
    assert {p.grad_dtype for p in model.parameters()} == {torch.float32}


def settings(tiny, folder, optim_args, model=None, **changes):
    changes = {"optim": "cpu_adam4bit", "gradient_accumulation_steps": 4, **changes}
    model = tiny.model(num_hidden_layers=3, dtype="bfloat16") if model is None else model
    return tiny.fit(LowMemTrainer, folder, model=model, optim_args=optim_args, **changes)


@pytest.mark.parametrize(
    ("ram", "accumulation", "chosen"), [(2**40, 4, "fp32"), (10**6, 4, "stochastic"), (2**40, 1, None)]
)
def test_auto_takes_fp32_where_ram_has_room(tiny, tmp_path, monkeypatch, capsys, ram, accumulation, chosen) -> None:
    monkeypatch.setattr("hf_lowmem.attachment.ram_bytes", lambda: ram)
    monkeypatch.setattr("hf_lowmem.attachment.check_room", lambda *args: None)
    trainer = settings(
        tiny, tmp_path, "offload=cpu,gradient_dtype=auto", gradient_accumulation_steps=accumulation, max_steps=2
    )
    out = capsys.readouterr().out
    assert ("how gradients of several micro-batches are added" in out) == (chosen is not None)
    wide = {getattr(p, "grad_dtype", p.dtype) for p in trainer.model.parameters()}
    assert wide == {torch.float32 if chosen == "fp32" else torch.bfloat16}
    assert (sums_of(trainer.model) is not None) == (chosen == "stochastic")
    if chosen:
        assert f'gradient_dtype="{chosen}"' in out
        plain = settings(tiny, tmp_path, f"offload=cpu,gradient_dtype={chosen}", max_steps=2)
        assert tiny.equal_bits(tiny.weights(plain.model), tiny.weights(trainer.model))


def test_a_resumed_run_is_the_run(tiny, tmp_path) -> None:
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    args = "offload=cpu,gradient_dtype=stochastic"
    whole = settings(tiny, tmp_path / "a", args, **changes)
    resumed = settings(tiny, tmp_path / "a", args, resume=str(tmp_path / "a" / "checkpoint-2"), **changes)
    assert tiny.equal_bits(tiny.weights(whole.model), tiny.weights(resumed.model))
    other = settings(tiny, tmp_path / "b", args, seed=1, data_seed=42, **changes)
    assert not tiny.equal_bits(tiny.weights(whole.model), tiny.weights(other.model))


def test_attached_loaded_and_detached(tiny, tmp_path) -> None:
    config = LowMemConfig(offload="cpu", gradient_dtype="stochastic")
    model = tiny.model(dtype="bfloat16")
    attach(model, config, "cpu")
    assert sums_of(model) is not None
    detach(model)
    assert sums_of(model) is None
    folder = save_tiny_model(tmp_path / "model", torch.bfloat16)
    model = load(folder, config, "cpu", dtype="bfloat16")
    tokens = tiny.data(1)[0]["input_ids"][None]
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert sums_of(model)._counts.keys() == set(range(len(list(model.parameters()))))
    assert set(sums_of(model)._counts.values()) == {(1, 1)}
    # A model that the user has attached without takes it from the Trainer.
    model = tiny.model(num_hidden_layers=3, dtype="bfloat16")
    attach(model, LowMemConfig(offload="cpu"), "cpu")
    late = settings(tiny, tmp_path, "offload=cpu,gradient_dtype=stochastic", model=model)
    plain = settings(tiny, tmp_path, "offload=cpu,gradient_dtype=stochastic")
    assert tiny.equal_bits(tiny.weights(plain.model), tiny.weights(late.model))


@pytest.mark.parametrize("how", ["model", "fp32", "stochastic", "auto"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_loop_of_ones_own(tiny, how, offload) -> None:
    """One config for attach and for the optimizer, streamed or not."""
    config = LowMemConfig(offload=offload, gradient_dtype=how)
    model = tiny.model(dtype="bfloat16")
    if how != "model":
        with pytest.raises(ValueError, match=r"gradient_dtype changes what happens|streams a model's blocks"):
            create_optimizer(model, config)
    attach(model, config, "cpu")
    optimizer = create_optimizer(model, config)
    tokens = tiny.data(1)[0]["input_ids"][None]
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {p.grad.dtype for p in model.parameters()}
    assert grads == {torch.float32 if how in ("fp32", "auto") else torch.bfloat16}
    assert (sums_of(model) is not None) == (how == "stochastic")
    optimizer.step()
