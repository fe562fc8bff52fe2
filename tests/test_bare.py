"""Weights that exist in 8 bits alone: no master, and no weight of more bits anywhere."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from counted_memory import auto
from test_attachment import CHECKPOINTING, assert_at_home, assert_same, build, checkpoint, link, run  # noqa: F401
from test_coded import as_seen
from test_drive_states import Extents, buffer
from test_streamed_trainer import fit, history

from hf_lowmem import (
    LowBitAdamW,
    LowMemConfig,
    LowMemTrainer,
    attach,
    create_optimizer,
    detach,
    load,
    loading,
)
from hf_lowmem.attachment import streamer_of
from hf_lowmem.code_updates import CodeUpdates
from hf_lowmem.kernels import native
from hf_lowmem.link import HostLink
from hf_lowmem.overlap import overlap

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
BARE = "weights=int8,master_bits=8"


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "max_grad_norm": 0.01, "dtype": "bfloat16"},
        {"max_grad_norm": 0.0, "dtype": "bfloat16"},
        {"optim": "cpu_adam32bit", "dtype": "bfloat16", "optim_args": "compute=int8"},
    ],
    ids=["accumulated", "checkpointed", "unclipped", "integers"],
)
def test_weights_in_8_bits_alone_wherever_blocks_rest(tiny, tmp_path, memory, changes) -> None:
    changes = {"optim": "cpu_adam4bit", **changes}
    optim_args = ",".join(filter(None, [changes.pop("optim_args", ""), BARE]))
    runs = [fit(tiny, tmp_path, where, optim_args=optim_args, **changes) for where in ("none", "cpu", "0.5")]
    placed = auto(tiny, tmp_path, optim_args=optim_args, **changes)
    memory.limit = placed._placement.plan.gpu - 2 * placed._placement._cost
    some = auto(tiny, tmp_path, optim_args=optim_args, **changes)
    assert 0 < sum(block.kept for block in streamer_of(some.model).blocks) < 4
    for other in (*runs[1:], placed, some):
        assert history(other) == history(runs[0])
        for (name, one), two in zip(runs[0].model.state_dict().items(), other.model.state_dict().values(), strict=True):
            assert torch.equal(one, two), name
    losses = [log["loss"] for log in history(runs[0]) if "loss" in log]
    plain = fit(tiny, tmp_path, "none", optim_args="", **changes)
    wanted = [log["loss"] for log in history(plain) if "loss" in log]
    assert losses != wanted
    assert losses == pytest.approx(wanted, abs=0.05)


def bare(tiny, offload="cpu", **changes):
    model = tiny.model(num_hidden_layers=4, dtype="bfloat16", **changes)
    return model, attach(model, LowMemConfig(offload=offload, weights="int8", master_bits=8))


def test_a_byte_a_parameter_rests(tiny) -> None:
    model, streamer = bare(tiny, **{**WIDE, "num_key_value_heads": 2})
    whole = sum(p.numel() for block in streamer.blocks for p in block.forms)
    assert sum(block.nbytes_of(p) for block in streamer.blocks for p in block.forms) < 1.05 * whole
    assert streamer.shelf.nbytes < 1.1 * whole + 4096 * 4
    p = model.model.layers[0].mlp.up_proj.weight
    assert p.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        p.add_(1)


@pytest.mark.parametrize("offload", ["cpu", "0.5", "none"])
def test_what_the_bits_say_is_saved_and_loaded(tiny, tmp_path, offload) -> None:
    plain = as_seen(tiny.model(num_hidden_layers=4, dtype="bfloat16"), "int8")
    model, _ = bare(tiny, offload)
    assert tiny.equal_bits(dict(plain.state_dict()), dict(model.state_dict()))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert tiny.equal_bits(tiny.weights(plain), tiny.weights(again))
    loaded = load(tmp_path, LowMemConfig(offload=offload, weights="int8", master_bits=8))
    assert loaded.model.layers[0].mlp.up_proj.weight.isnan().all()
    assert tiny.equal_bits(dict(plain.state_dict()), dict(loaded.state_dict()))
    shelf, blocks = streamer_of(loaded).shelf, streamer_of(loaded).blocks
    assert shelf.nbytes == sum(block.coded_layer.nbytes for block in blocks if not block.kept)
    other = tiny.model(seed=5, num_hidden_layers=4, dtype="bfloat16")
    assert model.load_state_dict(other.state_dict()) == ([], [])
    as_seen(other, "int8")
    assert tiny.equal_bits(dict(other.state_dict()), dict(model.state_dict()))
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(input_ids=tokens).logits, other(input_ids=tokens).logits)
    incomplete = {k: v for k, v in other.state_dict().items() if "up_proj" not in k}
    missing, unexpected = model.load_state_dict(incomplete, strict=False)
    assert len(missing) == 4
    assert not unexpected
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.mlp\.up_proj\.weight"):
        model.load_state_dict({**other.state_dict(), "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)})
    detach(model)
    assert tiny.equal_bits(tiny.weights(other), tiny.weights(model))


def test_loaded_where_they_do_not_fit(tiny, tmp_path, monkeypatch) -> None:
    """Parameters that are others than was expected before loading: all blocks are laid anew."""
    model = as_seen(tiny.model(num_hidden_layers=4, dtype="bfloat16"), "int8")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "_places_in", lambda block: object())
    loaded = load(tmp_path, LowMemConfig(offload="cpu", weights="int8", master_bits=8))
    for (name, one), two in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=2e-3), name


@pytest.mark.parametrize("offload", ["cpu", "0.5"])
def test_a_resumed_run_is_the_run(tiny, tmp_path, offload) -> None:
    settings = {"optim": "cpu_adam4bit", "optim_args": BARE, "dtype": "bfloat16", "max_steps": 6}
    whole = fit(tiny, tmp_path / "whole", offload, save_strategy="steps", save_steps=3, **settings)
    resumed = fit(tiny, tmp_path / "again", offload, resume=str(tmp_path / "whole" / "checkpoint-3"), **settings)
    assert tiny.equal_bits(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
    for one, other in zip(
        streamer_of(whole.model).codes().values(), streamer_of(resumed.model).codes().values(), strict=True
    ):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_states_of_other_weights_are_refused(tiny) -> None:
    optimizers = []
    for seed in (0, 1):
        model = tiny.model(seed=seed, num_hidden_layers=4, dtype="bfloat16")
        streamer = attach(model, LowMemConfig(offload="cpu", weights="int8", master_bits=8))
        optimizers.append(create_optimizer(model, LowMemConfig(), lr=1e-2))
        optimizers[-1].use_codes(streamer.codes())
        tokens = torch.tensor([[5, 6, 7]])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizers[-1].step()
    with pytest.raises(ValueError, match="codes of another weight than the model's"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    optimizers[1].load_state_dict(optimizers[1].state_dict())


def test_lora_over_8_bits_alone(tiny) -> None:
    reference, model = build(tiny, "lora"), build(tiny, "lora")
    attach(model, LowMemConfig(offload="cpu", weights="int8", master_bits=8))
    assert_same(run(as_seen(reference, "int8")), run(model))


def test_masters_are_refused_or_needed(tiny) -> None:
    with pytest.raises(ValueError, match=r'master_bits=8 leaves weights nothing but the 8 bits.*write weights="int8"'):
        LowMemConfig(master_bits=8)
    with pytest.raises(ValueError, match="exist in 4 bits alone, which cannot be trained"):
        attach(tiny.model(), LowMemConfig(offload="cpu", weights="int4", master_bits=8))


# -- what a stranger found ----------------------------------------------------------------------------------------
def losses_of(model, optimizer, steps: int = 4) -> list[float]:
    tokens = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_loop_of_ones_own_needs_no_more_than_the_optimizer(tiny) -> None:
    model, streamer = bare(tiny)
    optimizer = create_optimizer(model, LowMemConfig(), lr=1e-2)
    before = {p: codes.clone() for p, (codes, _) in streamer.codes().items()}
    losses = losses_of(model, optimizer)
    assert losses[-1] < losses[0] - 0.1
    assert all(not torch.equal(before[p], codes) for p, (codes, _) in streamer.codes().items())


@pytest.mark.parametrize("fails", [None, 1, 3], ids=["", "at once", "later"])
@pytest.mark.parametrize("isa", ["core", native.TORCH])
def test_the_device_updates_8_bits_alone_that_the_cpu_has_not_come_to(tiny, monkeypatch, isa, fails) -> None:
    if isa == native.TORCH:
        monkeypatch.setenv("HF_LOWMEM_ISA", isa)
    updates, update = [], HostLink.update

    def counted(self, part) -> None:
        updates.append(part)
        if len(updates) == fails:
            raise torch.OutOfMemoryError("no room for what travels")
        update(self, part)

    monkeypatch.setattr(HostLink, "update", counted)
    step = CodeUpdates.step

    def slow(*args):
        if threading.current_thread().name.startswith("hf_lowmem_late"):
            time.sleep(0.02)  # so that there is something that the CPU has not begun
        return step(*args)

    monkeypatch.setattr(CodeUpdates, "step", slow)
    runs = []
    for travels in (True, False):
        model, streamer = bare(tiny, debug=True)
        optimizer = create_optimizer(model, LowMemConfig(), lr=1e-2)
        overlap(streamer, optimizer, travels)
        if travels and fails is not None:
            tokens = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(1))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                losses_of(model, optimizer, 1)
            optimizer.zero_grad()
            losses = losses_of(model, optimizer, 3)
        else:
            losses = losses_of(model, optimizer)[fails is not None :]
        optimizer.synchronize()
        assert (len(updates) >= (fails or 1)) == travels
        found = [*(x for pair in streamer.codes().values() for x in pair), *model.state_dict().values()]
        found += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        runs.append((losses, [x.clone() for x in found]))
        updates.clear()
    assert runs[0][0] == runs[1][0]
    assert len(runs[0][1]) == len(runs[1][1])
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


def test_training_goes_on_after_detach(tiny) -> None:
    model, _ = bare(tiny)
    optimizer = create_optimizer(model, LowMemConfig(), lr=1e-2)
    losses_of(model, optimizer)
    detach(model)
    before = tiny.weights(model)
    losses_of(model, optimizer)
    assert not any(torch.equal(before[name], p) for name, p in model.named_parameters() if "proj" in name)
    assert not any("codes" in state for state in optimizer.state_dict()["state"].values())


def test_an_optimizer_that_knows_of_no_codes_says_so() -> None:
    p = torch.nn.Parameter(torch.full((), float("nan")).expand(64, 64))
    p.grad = torch.zeros(64, 64)
    with pytest.raises(ValueError, match=r"parameter 0 exists in few bits alone.*use_codes"):
        LowBitAdamW([p]).step()


@pytest.mark.parametrize("settings", [{"master_bits": 8}, {}], ids=["8 bits alone", "with masters"])
def test_attached_with_other_masters(tiny, tmp_path, settings) -> None:
    model = tiny.model(num_hidden_layers=4)
    attach(model, LowMemConfig(offload="cpu", weights="int8", **settings))
    other = {} if settings else {"master_bits": 8}
    with pytest.raises(ValueError, match=r"is attached with .*master_bits=8, and this config says master_bits="):
        tiny.fit(LowMemTrainer, tmp_path, model=model, trainer={"lowmem": {"weights": "int8", **other}})


@pytest.mark.parametrize("settings", [{"master_bits": 8}, {}], ids=["8 bits alone", "with masters"])
def test_an_attached_model_is_not_copied(tiny, settings) -> None:
    model = tiny.model()
    attach(model, LowMemConfig(offload="cpu", weights="int8", **settings))
    with pytest.raises(RuntimeError, match="cannot be copied or pickled: copy the model before it is attached"):
        copy.deepcopy(model)
    detach(model)
    assert tiny.equal_bits(tiny.weights(copy.deepcopy(model)), tiny.weights(model))


@pytest.mark.parametrize("settings", [{}, {"weights": "int8"}, {"weights": "int8", "master_bits": 8}], ids=str)
def test_parameters_are_not_replaced_by_loading(tiny, settings) -> None:
    model = tiny.model()
    attach(model, LowMemConfig(offload="cpu", **settings))
    with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\) would replace parameters"):
        model.load_state_dict(tiny.model(seed=1).state_dict(), assign=True)


def test_what_is_written_to_a_placeholder_is_not_lost_without_a_word(tiny) -> None:
    model, _ = bare(tiny)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 7.0
    with pytest.raises(RuntimeError, match=r"somebody has written to model\.layers\.1\.mlp\.up_proj\.weight"):
        model(input_ids=torch.tensor([[5, 6]]))


@pytest.mark.parametrize("optim_args", ["", BARE, "weights=int4"])
def test_without_the_compiled_core(tiny, tmp_path, monkeypatch, optim_args) -> None:
    """torch's own engine writes in the optimizer's thread, which nobody may take for somebody else."""
    monkeypatch.setenv("HF_LOWMEM_ISA", native.TORCH)
    settings = {"optim": "cpu_adam4bit", "optim_args": optim_args, "dtype": "bfloat16"}
    runs = [fit(tiny, tmp_path, where, **settings) for where in ("none", "cpu", "0.5")]
    monkeypatch.delenv("HF_LOWMEM_ISA")
    runs.append(fit(tiny, tmp_path, "cpu", **settings))
    for other in runs[1:]:
        assert history(other) == history(runs[0])
        assert tiny.equal_bits(dict(other.model.state_dict()), dict(runs[0].model.state_dict()))


def test_a_resumed_run_with_other_masters_is_refused_before_anything_changes(tiny, tmp_path) -> None:
    settings = {"optim": "cpu_adam4bit", "max_steps": 2}
    fit(tiny, tmp_path, "cpu", optim_args=BARE, dtype="bfloat16", save_strategy="steps", save_steps=2, **settings)
    model = tiny.model(seed=3, num_hidden_layers=4, dtype="bfloat16")
    before = tiny.weights(model)
    with pytest.raises(ValueError, match="was written with master_bits=24, and this run has 16"):
        fit(
            tiny,
            tmp_path,
            "cpu",
            model=model,
            optim_args="weights=int8,master_bits=16",
            resume=str(tmp_path / "checkpoint-2"),
            **settings,
        )
    assert tiny.equal_bits(before, tiny.weights(model))


@pytest.mark.parametrize("isa", ["core", native.TORCH])
def test_states_on_a_drive(tiny, monkeypatch, isa) -> None:
    if isa == native.TORCH:
        monkeypatch.setenv("HF_LOWMEM_ISA", isa)
    runs = []
    for rests in (True, False):
        model, streamer = bare(tiny, debug=True)
        optimizer = create_optimizer(model, LowMemConfig(), lr=1e-2)
        overlap(streamer, optimizer)
        if rests:
            optimizer.use_drive(Extents, range(1, 4), buffer)
        losses = losses_of(model, optimizer)
        optimizer.synchronize()
        assert sum(state["m"].is_meta for state in optimizer.state.values()) == rests * 3 * len(
            streamer.blocks[0].params
        )
        states = optimizer.state_dict()["state"]
        found = {f"{i} {name}": x for i, state in states.items() for name, x in state.items()} | model.state_dict()
        runs.append((losses, {name: torch.as_tensor(x).clone() for name, x in found.items()}))
    assert runs[0][0] == runs[1][0]
    assert runs[0][1].keys() == runs[1][1].keys()
    assert not [name for name, x in runs[0][1].items() if not torch.equal(x, runs[1][1][name])]
