"""Weights that cross the link in 8 or 4 bits: the device sees what those bits say, wherever a block rests.

The oracle is the same model whose weights have been written and read once, computing without any of this.
"""

from __future__ import annotations

import copy

import pytest
import torch
from counted_memory import auto
from test_attachment import CHECKPOINTING, assert_at_home, assert_same, build, checkpoint, link, run  # noqa: F401
from test_streamed_trainer import assert_same as assert_same_training
from test_streamed_trainer import fit

from hf_lowmem import (
    DoesNotFit,
    LowMemConfig,
    LowMemTrainer,
    attach,
    create_optimizer,
    detach,
    load,
)
from hf_lowmem.attachment import streamer_of
from hf_lowmem.kernels.weights import FORMS, decode, empty, encode
from hf_lowmem.lowbit import layer_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
FORMATS = pytest.mark.parametrize("weights", ["int8", "int4"])


def seen(p: torch.Tensor, weights: str) -> torch.Tensor:
    """A weight as its bits say."""
    form = FORMS[weights]
    codes, scale = empty(tuple(p.shape), form)
    encode(p.detach().contiguous(), form, codes, scale)
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    decode(codes, scale, form, out)
    return out


def as_seen(model: torch.nn.Module, weights: str) -> torch.nn.Module:
    """The oracle. Its weights are others, so its gradients are what counts."""
    for p in layer_weights(model):
        p.data = seen(p, weights)
    return model


@FORMATS
@pytest.mark.parametrize("offload", ["cpu", "0.5", "none"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_device_sees_what_the_bits_say(tiny, link, weights, kind, checkpointing, offload) -> None:  # noqa: F811
    reference, model = build(tiny, kind), build(tiny, kind)
    before = tiny.weights(model)
    for m in (reference, model):
        checkpoint(m.get_base_model() if kind == "lora" else m, checkpointing)
    plain = run(copy.deepcopy(reference))
    streamer = attach(model, LowMemConfig(offload=offload, weights=weights))
    assert sum(block.kept for block in streamer.blocks) == {"cpu": 0, "0.5": 3, "none": 5}[offload]
    found = run(model)
    assert_same(run(as_seen(reference, weights)), found)
    assert found[0] != plain[0]
    assert_at_home(streamer)
    assert tiny.equal_bits(before, tiny.weights(model))
    assert not any(place.there for place in streamer._places.values())
    tokens = torch.tensor([[5, 6, 7]])
    made = [m.eval().generate(input_ids=tokens, max_new_tokens=5, do_sample=False) for m in (reference, model)]
    assert torch.equal(*made)


@FORMATS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_with_released_memory_full_of_nan(tiny, link, weights, dtype) -> None:  # noqa: F811
    reference, model = (tiny.model(num_hidden_layers=4, dtype=dtype, **WIDE).train() for _ in range(2))
    attach(model, LowMemConfig(offload="cpu", weights=weights, debug=True))
    assert_same(run(as_seen(reference, weights)), run(model))


@FORMATS
@pytest.mark.parametrize("offload", ["cpu", "0.5", "0"])
def test_experts(tiny, weights, offload) -> None:
    reference, model = build_moe(), build_moe()
    assert {p.dim() for p in layer_weights(model)} == {2, 3}
    attach(model, LowMemConfig(offload=offload, weights=weights))
    assert_same(run(as_seen(reference, weights)), run(model))


def build_moe() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return MixtralForCausalLM(config).train()


def test_of_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    reference = GPT2LMHeadModel(config).eval()
    model = copy.deepcopy(reference)
    attach(model, LowMemConfig(offload="cpu", weights="int8"))
    assert_same(run(as_seen(reference, "int8")), run(model))


@FORMATS
def test_half_or_a_quarter_of_the_bytes_cross_the_link(tiny, weights) -> None:
    model = tiny.model(num_hidden_layers=4, dtype="bfloat16", **{**WIDE, "num_key_value_heads": 2})
    streamer = attach(model, LowMemConfig(offload="cpu", weights=weights))
    fetch, copied = streamer.link.fetch, []
    streamer.link.fetch = lambda slot, home: (copied.append(home.numel()), fetch(slot, home))[1]
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    whole = sum(block.layer.nbytes for block in streamer.blocks)
    assert len(copied) == 4
    assert sum(copied) / whole < {"int8": 0.53, "int4": 0.31}[weights]


# -- updates ------------------------------------------------------------------------------------------------------
@FORMATS
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "max_grad_norm": 0.01, "dtype": "bfloat16"},
        {"max_grad_norm": 0.0, "dtype": "bfloat16"},
        {"optim": "cpu_adam32bit", "optim_args": "master_bits=32", "dtype": "bfloat16"},
        {"optim_args": "compute=int8"},
    ],
    ids=["accumulated", "checkpointed", "unclipped", "fp32 masters", "integers"],
)
def test_the_same_training_wherever_blocks_rest(tiny, tmp_path, memory, weights, changes) -> None:
    changes = {"optim": "cpu_adam4bit", **changes}
    optim_args = ",".join(filter(None, [changes.pop("optim_args", ""), f"weights={weights}"]))
    runs = [fit(tiny, tmp_path, where, optim_args=optim_args, **changes) for where in ("none", "cpu", "0.5")]
    placed = auto(tiny, tmp_path, optim_args=optim_args, **changes)
    assert all(block.kept for block in streamer_of(placed.model).blocks)
    memory.limit = placed._placement.plan.gpu - 2 * placed._placement._cost
    some = auto(tiny, tmp_path, optim_args=optim_args, **changes)
    assert 0 < sum(block.kept for block in streamer_of(some.model).blocks) < 4
    for other in (*runs[1:], placed, some):
        assert_same_training(tiny, runs[0], other)
    plain = fit(tiny, tmp_path, "none", optim_args=optim_args.replace(f"weights={weights}", ""), **changes)
    assert not tiny.equal_bits(tiny.weights(plain.model), tiny.weights(runs[0].model))


def test_the_next_step_sees_the_update(tiny) -> None:
    """Step by step against a loop of its own: the gradients of what the bits say, the update of what rests at home."""
    reference, model = (tiny.model(num_hidden_layers=4, dtype="bfloat16").train() for _ in range(2))
    streamer = attach(model, LowMemConfig(offload="cpu", weights="int8"))
    optimizers = [create_optimizer(m, LowMemConfig(), lr=1e-2) for m in (reference, model)]
    optimizers[1].defer([[p for _, p in block.params] for block in streamer.blocks], then=streamer.encode)
    streamer.updates = optimizers[1]
    tokens = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        home = {p: p.data for p in layer_weights(reference)}
        as_seen(reference, "int8")
        losses = [m(input_ids=tokens, labels=tokens).loss for m in (reference, model)]
        for loss in losses:
            loss.backward()
        for p, data in home.items():
            p.data = data
        assert losses[0].item() == losses[1].item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        optimizers[1].synchronize()
        assert tiny.equal_bits(tiny.weights(reference), tiny.weights(model))


@pytest.mark.parametrize("through", ["torch", "data", "assignment"])
@pytest.mark.parametrize("offload", ["cpu", "none"])
@pytest.mark.parametrize("settings", [{}, {"weights": "int8"}, {"weights": "int8", "master_bits": 8}], ids=str)
def test_weights_written_at_home_are_seen(tiny, through, offload, settings) -> None:
    if settings.get("master_bits") == 8 and through != "assignment":
        pytest.skip("they cannot be written: test_a_byte_a_parameter_rests")
    if not settings and offload == "none":
        pytest.skip("is not attached")
    model, tokens = tiny.model().train(), torch.tensor([[5, 6, 7]])
    streamer = attach(model, LowMemConfig(offload=offload, **settings))
    first = model(input_ids=tokens).logits
    weights = model.state_dict()
    with torch.no_grad():
        for name, p in streamer.blocks[-1].params:
            if through == "assignment":
                p.data = weights[f"{streamer.blocks[-1].name}.{name}"] * 1.5
            else:
                (p if through == "torch" else p.data).mul_(1.5)
    again = model(input_ids=tokens).logits
    assert not torch.equal(first, again)
    bare = settings.get("master_bits") == 8
    assert all(p.isnan().all() for p in streamer.blocks[-1].forms) == (bare or not settings)
    detach(model)
    assert torch.equal((as_seen(model, "int8") if settings and not bare else model)(input_ids=tokens).logits, again)


def test_blocks_that_move_are_written_anew(tiny) -> None:
    model, tokens = tiny.model(), torch.tensor([[5, 6, 7]])
    streamer = attach(model, LowMemConfig(offload="cpu", weights="int4"))
    first = model(input_ids=tokens).logits
    for block in streamer.blocks:
        streamer.keep(block)
    assert torch.equal(model(input_ids=tokens).logits, first)
    for block in streamer.blocks:
        streamer.give_up(block)
    assert torch.equal(model(input_ids=tokens).logits, first)


# -- doors --------------------------------------------------------------------------------------------------------
def test_saved_and_loaded_as_ordinary_weights(tiny, tmp_path) -> None:
    model = tiny.model(num_hidden_layers=4, dtype="bfloat16")
    before = tiny.weights(model)
    attach(model, LowMemConfig(offload="cpu", weights="int8"))
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert tiny.equal_bits(before, tiny.weights(plain))
    as_seen(plain, "int8")
    for offload in ("cpu", "0.5", "none"):
        loaded = load(tmp_path, LowMemConfig(offload=offload, weights="int8"))
        assert tiny.equal_bits(before, tiny.weights(loaded))
        tokens = torch.tensor([[5, 6, 7]])
        assert torch.equal(loaded(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_refused(tiny, tmp_path) -> None:
    with pytest.raises(ValueError, match="weights='int3' is none that weights can cross the link in"):
        LowMemConfig(weights="int3")
    with pytest.raises(ValueError, match="no weight that could be written as int8"):
        attach(tiny.model(hidden_size=32, intermediate_size=32), LowMemConfig(offload="cpu", weights="int8"))
    with pytest.raises(ValueError, match='weights="int8" streams'):
        create_optimizer(tiny.model(), LowMemConfig(weights="int8"))
    model = tiny.model(num_hidden_layers=4)
    attach(model, LowMemConfig(offload="cpu", weights="int8"))
    for given in ({"weights": "int4", "offload": "cpu"}, {"weights": "int8", "offload": "0.5"}):
        with pytest.raises(ValueError, match="is not how LlamaForCausalLM is attached, with 4 streamed blocks"):
            tiny.fit(LowMemTrainer, tmp_path, model=model, trainer={"lowmem": given})
    tiny.fit(LowMemTrainer, tmp_path, model=model, trainer={"lowmem": {"weights": "int8"}}, max_steps=1)
    with pytest.raises(ValueError, match="moves weights under a compiled model"):
        LowMemTrainer(
            model=model, args=tiny.args(tmp_path, torch_compile=True), lowmem={"weights": "int8"}, train_dataset=[]
        )


def test_their_bytes_count(tiny) -> None:
    model = tiny.model(num_hidden_layers=4, **WIDE)
    streamed = sum(p.nbytes for layer in model.model.layers for p in layer.parameters())
    with pytest.raises(DoesNotFit, match="RAM"):
        attach(model, LowMemConfig(offload="cpu", weights="int8", cpu_memory=f"{streamed + 4000}B"))
    attach(model, LowMemConfig(offload="cpu", weights="int8", cpu_memory=f"{int(streamed * 1.3)}B"))
