"""Blocks that compute a batch in parts: the same training but for the order of sums, with one fetch of weights."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from architectures import T5, make
from torch import nn
from transformers import Trainer

from hf_lowmem import LowMemConfig, LowMemTrainer, attach
from hf_lowmem.activations import InputOffload
from hf_lowmem.attachment import detach, find_blocks, streamer_of
from hf_lowmem.checkpointing import own_function, standing
from hf_lowmem.split import BatchSplit

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def checkpoint(model, reentrant: bool = False) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def batch(samples: int, length: int = 12):
    tokens = torch.randint(3, 128, (samples, length), generator=torch.Generator().manual_seed(samples))
    mask = torch.ones_like(tokens)
    mask[1:, -3:] = 0  # so that the mask has a row for each sample
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


def run(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(one, other) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("offload", ["none", "cpu", "0.5"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("samples", "rows"), [(6, 2), (5, 2), (4, 1), (3, 4)])
def test_split_is_unsplit(tiny, offload, reentrant, samples, rows) -> None:
    whole, model = tiny.model(num_hidden_layers=4).train(), tiny.model(num_hidden_layers=4).train()
    for m in (whole, model):
        checkpoint(m, reentrant)
    streamer = attach(model, LowMemConfig(offload=offload), "cpu")
    split = BatchSplit([m for _, m in find_blocks(model)], rows, None if streamer is None else streamer.whole)
    assert split.install() == split.install() == 4
    computed = []
    model.model.layers[1].self_attn.register_forward_hook(lambda module, args, out: computed.append(len(out[0])))
    for seed in range(2):
        torch.manual_seed(seed)
        fetched = 0 if streamer is None else streamer.fetches
        assert_close(run(whole, batch(samples)), run(model, batch(samples)))
        if streamer is not None:
            assert not streamer._there
            if samples > rows:  # once for the forward and once for the backward
                assert streamer.fetches - fetched <= 2 * len(streamer.blocks)
    assert max(computed) <= rows
    assert sum(computed) == 2 * 2 * samples  # two times, forward and again in backward
    split.remove()
    assert not any(list(standing(module)) for _, module in find_blocks(model))


def test_no_gradients_and_evaluation_are_not_split(tiny) -> None:
    model = tiny.model()
    checkpoint(model)
    split = BatchSplit([m for _, m in find_blocks(model)], 1)
    split.install()
    computed = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: computed.append(len(out)))
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            model(**batch(3))
    assert computed == [3, 3]


def test_with_inputs_in_ram(tiny) -> None:
    """Whichever is installed first, and however often; a copied model has its own functions."""
    for order in (0, 1):
        whole, model = tiny.model(num_hidden_layers=3).train(), tiny.model(num_hidden_layers=3).train()
        for m in (whole, model):
            checkpoint(m)
        modules = [m for _, m in find_blocks(model)]
        own = [own_function(m) for m in modules]
        offload, split = InputOffload(modules, torch.device("cpu")), BatchSplit(modules, 2)
        for _ in range(2):
            for one in ((offload, split), (split, offload))[order]:
                assert one.install() == 3
        assert [type(x).__name__ for x in standing(modules[0])] == ["_Split", "_Offloaded"]
        assert_close(run(whole, batch(6)), run(model, batch(6)))
        assert offload.nbytes >= 3 * 6 * 12 * 64 * 4
        twin = copy.deepcopy(model)
        assert not list(standing(twin.model.layers[0]))
        for one in ((offload, split), (split, offload))[order]:
            one.remove()
        assert [own_function(m) for m in modules] == own
        assert not list(standing(modules[0]))


@pytest.mark.parametrize("offload", ["none", "cpu", "auto"])
@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2}])
def test_a_trainer_splits(tiny, tmp_path, memory, offload, changes) -> None:
    settings = {"optim": "cpu_adam32bit", "per_device_train_batch_size": 4, **CHECKPOINTED, **changes}
    runs = []
    for optim_args in ("offload=none", f"offload={offload},gpu_memory=1GB,micro_batch_size=1"):
        model = tiny.model(num_hidden_layers=4)
        runs.append(tiny.fit(LowMemTrainer, tmp_path, model=model, optim_args=optim_args, **settings))
    whole, split = (tiny.weights(r.model) for r in runs)
    for name, weight in whole.items():
        torch.testing.assert_close(weight, split[name], rtol=0, atol=2e-4, msg=name)  # a fifth of a step
    losses = [[log["loss"] for log in r.state.log_history if "loss" in log] for r in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert runs[1]._split is not None


def test_instead_of_accumulation(tiny, tmp_path) -> None:
    """One batch in four parts, and four micro-batches: the same steps, normalized over the same tokens."""
    data = tiny.data(32)
    for i, sample in enumerate(data):
        sample["labels"] = sample["labels"].clone()
        sample["labels"][: i % 9] = -100
    settings = {"optim": "cpu_adam32bit", "optim_args": "offload=cpu", "trainer": {"train_dataset": data}}
    runs = []
    for changes in (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 8, "optim_args": "offload=cpu,micro_batch_size=2"},
    ):
        model = tiny.model(num_hidden_layers=4)
        runs.append(tiny.fit(LowMemTrainer, tmp_path, model=model, **{**settings, **CHECKPOINTED, **changes}))
    logs = [[(log["loss"], log["grad_norm"]) for log in r.state.log_history if "loss" in log] for r in runs]
    assert len(logs[0]) == 4
    for one, other in zip(*logs, strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    assert streamer_of(runs[1].model).fetches < streamer_of(runs[0].model).fetches / 3


def test_an_auxiliary_loss_is_refused(tiny, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"auxiliary loss of MixtralForCausalLM .*config.output_router_logits=False"):
        tiny.fit(
            LowMemTrainer,
            tmp_path,
            model=make("MixtralForCausalLM", num_local_experts=4, output_router_logits=True)(),
            optim="cpu_adam4bit",
            optim_args="micro_batch_size=1",
            **CHECKPOINTED,
        )


def test_what_is_not_checkpointed_is_refused(tiny, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"micro_batch_size=1 .* no block of LlamaForCausalLM is checkpointed"):
        tiny.fit(LowMemTrainer, tmp_path, optim="cpu_adam4bit", optim_args="micro_batch_size=1")
    assert LowMemConfig.from_optim_args("cpu_adam4bit", "micro_batch_size=none").micro_batch_size is None
    for bad in (0, "two", 1.5):
        with pytest.raises(ValueError, match="micro_batch_size"):
            LowMemConfig(micro_batch_size=bad)


class Odd(nn.Module):
    """A layer as transformers checkpoints one, with arguments of its own."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._gradient_checkpointing_func = lambda function, *args: function(*args)
        self.returns = lambda x: x

    def forward(self, x, **kwargs):
        import functools

        def inner(x, **kwargs):
            return self.returns(self.linear(x))

        return self._gradient_checkpointing_func(functools.partial(inner, **kwargs), x)


@pytest.mark.parametrize(
    ("kwargs", "returns", "message"),
    [
        ({"memory": torch.zeros(3, 4)}, lambda x: x, r"argument memory of Odd, a tensor of shape \(3, 4\)"),
        ({"memory": object()}, lambda x: x, "argument memory of Odd, object"),
        ({"attention_mask": torch.zeros(2, 4)}, lambda x: x, r"attention_mask of Odd, a tensor of shape \(2, 4\)"),
        ({"position_bias": torch.zeros(3, 1, 5)}, lambda x: x, r"position_bias of Odd, .* \(3, 1, 5\)"),  # of each head
        ({"position_embeddings": (torch.zeros(3, 4),) * 2}, lambda x: x, "position_embeddings of Odd"),  # of each token
        ({"x2": torch.zeros(3, 5, 4)}, lambda x: x, "argument x2 of Odd"),
        ({}, lambda x: x.sum(), r"Odd returns a tensor of shape \(\) for 1 samples"),
        ({}, lambda x: {"x": x}, "Odd returns dict"),
    ],
)
def test_what_cannot_be_cut_or_joined_is_refused(kwargs, returns, message) -> None:
    layer = Odd()
    layer.returns = returns
    BatchSplit([layer], 1).install()
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(3, 5, 4), **kwargs)


class Pair(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


def test_tokens_without_samples_are_not_cut() -> None:
    layer = Odd()
    seen: list[tuple[int, ...]] = []
    layer.returns = lambda x: (seen.append(tuple(x.shape)), x)[1]
    BatchSplit([layer], 1).install()
    layer(torch.zeros(6, 4))
    assert seen == [(6, 4)]


def test_what_can_be_cut_and_joined() -> None:
    layer = Odd()
    layer.returns = lambda x: (x, None, [x + 1])
    BatchSplit([layer], 2).install()
    x = torch.randn(5, 6, 4)
    pair = Pair(torch.zeros(1, 6, 4), torch.zeros(5, 6, 4))
    kwargs = {"position_embeddings": pair, "cache_position": torch.arange(5)}
    out = layer(x, **kwargs, use_cache=False, past_key_values=None)
    torch.testing.assert_close(out[0], layer.linear(x))
    assert out[1] is None
    torch.testing.assert_close(out[2][0], layer.linear(x) + 1)


@pytest.mark.parametrize(
    "build",
    [
        make("T5ForConditionalGeneration", T5, decoder_start_token_id=0, dropout_rate=0.0),
        make("MixtralForCausalLM", num_local_experts=4),
    ],
    ids=["t5", "moe"],
)
def test_other_architectures(build) -> None:
    torch.manual_seed(0)
    whole = build().train()
    model = copy.deepcopy(whole)
    for m in (whole, model):
        checkpoint(m)
    streamer = attach(model, LowMemConfig(offload="cpu"), "cpu")
    BatchSplit([m for _, m in find_blocks(model)], 1, streamer.whole).install()
    assert_close(run(whole, batch(4)), run(model, batch(4)))


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_nothing_of_it_is_left(tiny, tmp_path, offload) -> None:
    """After a training, and after the model has been detached, whose weights are its own then."""
    model = tiny.model(num_hidden_layers=3)
    settings = {"optim": "cpu_adam4bit", "per_device_train_batch_size": 4, **CHECKPOINTED}
    optim_args = f"offload={offload},micro_batch_size=1,offload_activations=true"
    trainer = tiny.fit(LowMemTrainer, tmp_path, model=model, optim_args=optim_args, **settings)
    names = {type(x).__name__ for _, module in find_blocks(model) for x in standing(module)}
    assert names == {"_Offloaded"}
    trainer._split_batches()
    if offload == "cpu":
        detach(model)
        assert not any(list(standing(module)) for _, module in find_blocks(model))
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    at = weight.data_ptr()
    run(model.train(), batch(4))
    assert weight.data_ptr() == at


def test_a_streamer_that_was_taken_off_is_asked_no_more(tiny) -> None:
    model = tiny.model()
    streamer = attach(model, LowMemConfig(offload="cpu"), "cpu")
    module = streamer.blocks[0].module
    assert streamer.whole(module) is not None
    detach(model)
    assert streamer.whole(module) is None


@pytest.mark.parametrize("output", ["output_attentions", "output_hidden_states"])
def test_what_layers_are_asked_to_tell_is_refused(tiny, output) -> None:
    model = tiny.model(attn_implementation="eager").train()
    checkpoint(model)
    BatchSplit([m for _, m in find_blocks(model)], 1).install()
    with pytest.raises(ValueError, match=f"{output} collects what these compute for whole ones"):
        model(**batch(3), **{output: True})
    assert model(**batch(3)).loss > 0


@pytest.mark.parametrize("optim_args", ["micro_batch_size=1", "offload_activations=true", "gradient_dtype=fp32"])
def test_the_stock_trainer_does_not_ignore_them(tiny, tmp_path, optim_args) -> None:
    with pytest.raises(ValueError, match=f"{optim_args.split('=')[0]} changes what happens in a training step"):
        tiny.fit(Trainer, tmp_path, optim="cpu_adam4bit", optim_args=optim_args)
