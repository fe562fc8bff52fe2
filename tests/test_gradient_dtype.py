"""Gradients in fp32 beside weights of 16 bits: more exact sums, wherever blocks rest."""

from __future__ import annotations

import pytest
import torch
from test_streamed_trainer import assert_same
from tiny_model import save_tiny_model
from torch import nn

from hf_lowmem import LowMemConfig, LowMemTrainer, attach, load
from hf_lowmem.attachment import detach, streamer_of
from hf_lowmem.checks import check_gradients
from hf_lowmem.plan import footprint

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
WIDE = "gradient_dtype=fp32"


STOCHASTIC = "gradient_dtype=stochastic"


def fit(tiny, folder, optim_args, dtype="bfloat16", **changes):
    settings = {"optim": "cpu_adam4bit", "max_steps": 4, "gradient_accumulation_steps": 4, **changes}
    model = tiny.model(num_hidden_layers=4, dtype=dtype)
    return tiny.fit(LowMemTrainer, folder, model=model, optim_args=optim_args, **settings)


@pytest.mark.parametrize("how", [WIDE, STOCHASTIC])
@pytest.mark.parametrize(
    "changes", [{}, {"max_grad_norm": 0.0}, {"gradient_checkpointing": True}, {"dtype": "float16"}]
)
def test_the_same_wherever_blocks_rest(tiny, tmp_path, memory, changes, how) -> None:
    whole = fit(tiny, tmp_path, how, **changes)
    for optim_args in ("offload=cpu", "offload=0.5", "offload=auto,gpu_memory=1GB"):
        assert_same(tiny, whole, fit(tiny, tmp_path, f"{optim_args},{how}", **changes))
    narrow = fit(tiny, tmp_path, "offload=cpu", **changes)
    assert not tiny.equal_bits(tiny.weights(whole.model), tiny.weights(narrow.model))


@pytest.mark.parametrize("offload", ["cpu", "0.5"])
def test_sums_are_those_of_fp32(tiny, offload) -> None:
    """Of 16 micro-batches: each gradient is rounded once, and not each sum."""
    batches = [{k: v[None] for k, v in row.items()} for row in tiny.data(16)]
    exact: dict[str, torch.Tensor] = {}
    single = tiny.model(num_hidden_layers=3, dtype="bfloat16").train()
    for batch in batches:
        single.zero_grad()
        single(**batch).loss.backward()
        for name, p in single.named_parameters():
            exact[name] = exact.get(name, 0) + p.grad.double()
    errors = {}
    for dtype in ("model", "fp32"):
        model = tiny.model(num_hidden_layers=3, dtype="bfloat16").train()
        attach(model, LowMemConfig(offload=offload, gradient_dtype=dtype), "cpu")
        for batch in batches:
            model(**batch).loss.backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32 if dtype == "fp32" else torch.bfloat16}
        errors[dtype] = sum((p.grad.double() - exact[name]).norm() ** 2 for name, p in model.named_parameters()) ** 0.5
    norm = sum(g.norm() ** 2 for g in exact.values()) ** 0.5
    assert errors["fp32"] < 1e-6 * norm
    assert errors["model"] > 1e-3 * norm


def test_what_it_takes_and_where_it_ends(tiny) -> None:
    model = tiny.model(dtype="bfloat16")
    streamer = attach(model, LowMemConfig(offload="cpu", gradient_dtype="fp32"), "cpu")
    params = list(model.parameters())
    widths = dict.fromkeys(params, (4, 24))
    assert footprint(params, widths).gradients == 4 * sum(p.numel() for p in params)
    assert streamer.blocks[0].gradient_layer.nbytes > 1.9 * streamer.blocks[0].layer.nbytes
    detach(model)
    assert {p.grad_dtype for p in params} == {torch.bfloat16}
    assert footprint(params, widths).gradients == 2 * sum(p.numel() for p in params)


def test_loaded(tiny, tmp_path) -> None:
    folder = save_tiny_model(tmp_path / "model", torch.bfloat16)
    model = load(folder, LowMemConfig(offload="cpu", gradient_dtype="fp32"), "cpu", dtype="bfloat16")
    layer = streamer_of(model).blocks[0].gradient_layer
    assert {spec.dtype for spec in layer.specs} == {torch.float32}
    assert {p.grad_dtype for p in model.parameters()} == {torch.float32}


def test_what_is_refused(tiny, tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"gradient_dtype='fp16' is none that gradients are accumulated in"):
        LowMemConfig(gradient_dtype="fp16")
    model = tiny.model(dtype="bfloat16")
    attach(model, LowMemConfig(offload="cpu"), "cpu")
    with pytest.raises(ValueError, match=r'gradient_dtype="fp32" came after .* detach\(model\) first'):
        tiny.fit(LowMemTrainer, tmp_path, model=model, optim="cpu_adam4bit", optim_args=f"offload=cpu,{WIDE}")
    model = tiny.model(dtype="bfloat16")
    model(**{k: v[None] for k, v in tiny.data(1)[0].items()}).loss.backward()
    with pytest.raises(ValueError, match=r"has a gradient already: leave it out, or call model.zero_grad\(\) first"):
        attach(model, LowMemConfig(offload="cpu", gradient_dtype="fp32"), "cpu")

    class OnGpu:
        grad_dtype, dtype, requires_grad, device = torch.float32, torch.bfloat16, True, torch.device("cuda", 0)

    class Model(nn.Module):
        def named_parameters(self, *args):
            return [("head.weight", OnGpu())]

    config = LowMemConfig(gradient_dtype="fp32")
    check_gradients(Model(), config, stays=True)
    check_gradients(Model(), LowMemConfig(), stays=False)
    with pytest.raises(ValueError, match=r'head.weight, on cuda:0, is updated in RAM: write offload="auto"'):
        check_gradients(Model(), config, stays=False)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [WIDE, STOCHASTIC])
def test_on_a_gpu(tiny, tmp_path, how) -> None:
    runs = [
        fit(tiny, tmp_path, f"offload={offload},{how}", use_cpu=False, gradient_checkpointing=True)
        for offload in ("0", "cpu", "0.5")
    ]
    weights = [{name: p.cpu() for name, p in tiny.weights(run.model).items()} for run in runs]
    assert tiny.equal_bits(weights[0], weights[1])
    assert tiny.equal_bits(weights[0], weights[2])
