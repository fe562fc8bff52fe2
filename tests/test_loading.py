"""``load``, against ``from_pretrained``: the same model, the same files when it is saved, the same errors."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_lowmem import LowMemConfig, LowMemTrainer, load, loading
from hf_lowmem.attachment import streamer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks for it
CPU = LowMemConfig(offload="cpu")


def make(tiny, kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "experts":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
        return MixtralForCausalLM(
            MixtralConfig(vocab_size=128, num_key_value_heads=2, num_local_experts=4, pad_token_id=0, **sizes)
        )
    if kind == "t5":
        sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=128, decoder_start_token_id=0, **sizes))
    return tiny.model(num_hidden_layers=4, tie_word_embeddings=kind == "tied")


@pytest.fixture(scope="session")
def checkpoints(tiny, tmp_path_factory):
    """Folders of checkpoints in fp32, one of each kind."""
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in ("untied", "tied", "experts", "t5"):
        make(tiny, kind).save_pretrained(root / kind)
    make(tiny, "untied").save_pretrained(root / "sharded", max_shard_size="100KB")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    shutil.copytree(root / "untied", root / "bin")
    torch.save(load_file(root / "untied/model.safetensors"), root / "bin/pytorch_model.bin")
    (root / "bin/model.safetensors").unlink()
    return root


def class_of(folder):
    return AutoModelForSeq2SeqLM if folder.name == "t5" else AutoModelForCausalLM


def both(folder, config=CPU, **kwargs):
    """A checkpoint as from_pretrained loads it, and as we do."""
    stock = class_of(folder).from_pretrained(folder, **kwargs)
    return stock, load(folder, config, "cpu", model_class=class_of(folder), **kwargs)


def assert_equal_models(stock, ours) -> None:
    assert type(stock) is type(ours)
    for tensors in ("named_parameters", "named_buffers"):
        one, other = dict(getattr(stock, tensors)()), dict(getattr(ours, tensors)())
        assert list(one) == list(other)  # tied parameters are in it once
        for name, value in one.items():
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
            assert value.requires_grad == other[name].requires_grad
            assert other[name].device.type == "cpu"
    assert list(stock.state_dict()) == list(ours.state_dict())
    assert stock.training == ours.training
    assert vars(stock).keys() == vars(ours).keys() - {"_apply"}  # attach's
    assert [repr(c) for c in stock._weight_conversions] == [repr(c) for c in ours._weight_conversions]
    for one, other in zip(stock.modules(), ours.modules(), strict=True):
        for value in vars(one):
            if isinstance(getattr(one, value, None), PreTrainedConfig):
                assert getattr(one, value).to_dict() == getattr(other, value).to_dict()
    assert not any("quantization_config" in vars(m.config) for m in ours.modules() if isinstance(m, PreTrainedModel))


def generated(model) -> torch.Tensor:
    tokens = torch.tensor([[5, 6, 7, 9]])
    return model.eval().generate(input_ids=tokens, max_new_tokens=6, do_sample=False)


def assert_at_home(model) -> None:
    streamer = streamer_of(model)
    for number, block in enumerate(streamer.blocks):
        slab = streamer.shelf.weights(number)
        for (_, p), view in zip(block.params, block.layer.views(slab), strict=True):
            assert p.data_ptr() == view.data_ptr()


@pytest.fixture
def hung(monkeypatch):
    """The shelves that attach was given: None where the blocks did not fit where they had been laid."""
    shelves = []
    hang = loading.hang

    def spy(model, blocks, config, device, shelf=None):
        shelves.append(shelf)
        return hang(model, blocks, config, device, shelf)

    monkeypatch.setattr(loading, "hang", spy)
    return shelves


@pytest.mark.parametrize("offload", ["cpu", "0.5", "none"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("kind", ["untied", "tied", "experts", "t5", "sharded", "bin"])
def test_equal_to_stock(checkpoints, hung, kind, dtype, offload) -> None:
    stock, ours = both(checkpoints / kind, LowMemConfig(offload=offload), dtype=dtype)
    assert_equal_models(stock, ours)
    if offload == "none":
        assert streamer_of(ours) is None
    else:
        assert len(streamer_of(ours).blocks) == (4 if offload == "cpu" else 2)
        assert_at_home(ours)
        assert hung[0] is streamer_of(ours).shelf
    assert torch.equal(generated(stock), generated(ours))


def test_every_streamed_tensor_goes_through_its_slab(checkpoints, monkeypatch) -> None:
    put = []
    original = loading.Filling.put

    def spy(self, name, value):
        home = original(self, name, value)
        put.append((name, home.data_ptr()))
        return home

    monkeypatch.setattr(loading.Filling, "put", spy)
    for kind in ("tied", "experts", "t5"):
        put.clear()
        ours = load(checkpoints / kind, CPU, "cpu", model_class=class_of(checkpoints / kind), dtype="bfloat16")
        at = dict(put)
        for block in streamer_of(ours).blocks:
            assert all(at[f"{block.name}.{name}"] == p.data_ptr() for name, p in block.params)


def test_two_loads_have_nothing_in_common(checkpoints) -> None:
    one, other = (load(checkpoints / "tied", CPU, "cpu") for _ in range(2))
    with torch.no_grad():
        for p in one.parameters():
            p.zero_()
    stock = AutoModelForCausalLM.from_pretrained(checkpoints / "tied")
    assert_equal_models(stock, other)


def test_the_file_is_left_alone(checkpoints) -> None:
    before = (checkpoints / "untied/model.safetensors").read_bytes()
    ours = load(checkpoints / "untied", LowMemConfig(offload=0.5), "cpu")
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1)
    assert (checkpoints / "untied/model.safetensors").read_bytes() == before


def test_a_model_s_own_class_and_the_stock_arguments(checkpoints) -> None:
    config = LlamaForCausalLM.config_class.from_pretrained(checkpoints / "untied", attention_dropout=0.5)
    ours, info = load(
        checkpoints / "untied", CPU, "cpu", model_class=LlamaForCausalLM, model_config=config, output_loading_info=True
    )
    assert ours.config.attention_dropout == 0.5
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(streamer_of(ours).blocks) == 4
    assert load(checkpoints / "untied", CPU, "cpu", attn_implementation="eager").config._attn_implementation == "eager"


def test_a_name_in_the_hub_s_cache(checkpoints, tmp_path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "models--somebody--tiny"
    shutil.copytree(checkpoints / "sharded", model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit)
    ours = load("somebody/tiny", CPU, "cpu", cache_dir=tmp_path, local_files_only=True)
    stock = AutoModelForCausalLM.from_pretrained("somebody/tiny", cache_dir=tmp_path, local_files_only=True)
    assert_equal_models(stock, ours)
    assert_at_home(ours)


# -- what does not fit --------------------------------------------------------------------------------------------
@pytest.fixture
def warned():
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)  # not by the attribute: a logger remembers which levels are enabled
    yield records
    log.setLevel(level)
    log.removeHandler(handler)


def edited(checkpoints, tmp_path, kind="untied", **changes):
    """A checkpoint some of whose tensors are gone (None) or others."""
    folder = tmp_path / kind
    shutil.copytree(checkpoints / kind, folder)
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def seeded(folder, **kwargs):
    results = []
    for ours in (False, True):
        torch.manual_seed(11)
        args = {"output_loading_info": True, **kwargs}
        results.append(load(folder, CPU, "cpu", **args) if ours else class_of(folder).from_pretrained(folder, **args))
    (stock, stock_info), (ours, info) = results
    assert {key: set(value) for key, value in stock_info.items()} == {key: set(value) for key, value in info.items()}
    return stock, ours, info


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_missing_and_unexpected_keys(checkpoints, tmp_path, hung, warned) -> None:
    changes = {DOWN: None, "lm_head.weight": None, "model.layers.2.input_layernorm.weight": None}
    folder = edited(checkpoints, tmp_path, **changes, **{"model.stranger": torch.zeros(3)})
    stock, ours, info = seeded(folder)
    assert info["missing_keys"] == set(changes)
    assert set(info["unexpected_keys"]) == {"model.stranger"}
    assert_equal_models(stock, ours)
    assert_at_home(ours)
    assert hung == [streamer_of(ours).shelf]
    assert len(warned) == 2
    assert all("down_proj.weight" in message and "MISSING" in message for message in warned)


def test_missing_experts(checkpoints, tmp_path, warned) -> None:
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    assert name.format(3) in load_file(checkpoints / "experts/model.safetensors")
    folder = edited(checkpoints, tmp_path, "experts", **{name.format(i): None for i in range(4)})
    stock, ours, info = seeded(folder)
    assert set(info["missing_keys"]) == {"model.layers.1.mlp.experts.down_proj"}
    assert_equal_models(stock, ours)
    assert_at_home(ours)


def test_mismatched_keys(checkpoints, tmp_path) -> None:
    folder = edited(checkpoints, tmp_path, **{DOWN: torch.zeros(64, 130), "lm_head.weight": torch.zeros(100, 64)})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(folder)
    message = rf"lm_head.weight is \[100, 64\] in the checkpoint, \[128, 64\] in the model; {DOWN} is .*ignore_mism"
    with pytest.raises(RuntimeError, match=message):
        load(folder, CPU, "cpu")
    stock, ours, info = seeded(folder, ignore_mismatched_sizes=True)
    assert {name for name, *_ in info["mismatched_keys"]} == {DOWN, "lm_head.weight"}
    assert_equal_models(stock, ours)
    assert_at_home(ours)


def test_a_mismatched_tensor_of_another_dtype(tmp_path) -> None:
    """Neither version may take a tensor of a wrong shape without a word, whoever loads it."""

    class WithBuffer(LlamaForCausalLM):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = WithBuffer(config)
    model.counts.copy_(torch.arange(5))
    model.save_pretrained(tmp_path)
    assert load(tmp_path, CPU, "cpu", model_class=WithBuffer, dtype="bfloat16").counts.tolist() == [0, 1, 2, 3, 4]
    tensors = {**load_file(tmp_path / "model.safetensors"), "counts": torch.arange(6)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="mismatched_sizes"):
        load(tmp_path, CPU, "cpu", model_class=WithBuffer, dtype="bfloat16")


def test_both_of_a_tied_pair_in_the_file(checkpoints, tmp_path) -> None:
    embedding = load_file(checkpoints / "tied/model.safetensors")["model.embed_tokens.weight"]
    folder = edited(checkpoints, tmp_path, "tied", **{"lm_head.weight": embedding.clone()})
    stock, ours, _ = seeded(folder)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert_equal_models(stock, ours)


def test_parameters_that_stay_in_fp32(checkpoints, hung) -> None:
    """The blocks' layout is another one than expected; they move, one after another."""
    stock, ours = both(checkpoints / "t5", dtype=torch.float16)
    dtypes = {p.dtype for _, p in streamer_of(ours).blocks[0].params}
    assert dtypes == {torch.float16, torch.float32}
    assert_equal_models(stock, ours)
    assert_at_home(ours)
    assert hung == [None]


def test_a_folder_of_adapters(checkpoints, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(checkpoints / "untied"),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path)
    stock, ours = AutoModelForCausalLM.from_pretrained(tmp_path), load(tmp_path, CPU, "cpu")
    assert any("lora_A" in name for name, _ in ours.named_parameters())
    one, other = ({n: p.requires_grad for n, p in m.named_parameters()} for m in (stock, ours))
    assert one == other
    assert torch.equal(generated(stock), generated(ours))
    assert_at_home(ours)


# -- afterwards ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["untied", "tied", "experts"])
@pytest.mark.parametrize("optim", ["cpu_adam4bit", "cpu_adam32bit"])
def test_training(tiny, checkpoints, tmp_path, kind, optim) -> None:
    optim_args = "master_bits=32," if optim == "cpu_adam32bit" else ""
    results = []
    for ours in (False, True):
        folder = checkpoints / kind
        model = load(folder, CPU, "cpu") if ours else AutoModelForCausalLM.from_pretrained(folder)
        offload = "cpu" if ours else "none"
        trainer = tiny.fit(
            LowMemTrainer, tmp_path, model=model, optim=optim, optim_args=f"{optim_args}offload={offload}"
        )
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        results.append((losses, tiny.weights(trainer.model)))
        assert len(losses) == 4
    assert results[0][0] == results[1][0]
    assert tiny.equal_bits(results[0][1], results[1][1])
    assert_at_home(model)


@pytest.mark.parametrize("shard", ["5GB", "60KB"])
@pytest.mark.parametrize("kind", ["untied", "tied", "experts", "t5"])
def test_saved_as_stock_saves_it(checkpoints, tmp_path, kind, shard) -> None:
    stock, ours = both(checkpoints / kind, dtype="bfloat16")
    stock.save_pretrained(tmp_path / "stock", max_shard_size=shard)
    ours.save_pretrained(tmp_path / "ours", max_shard_size=shard)
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert (len(names) > 4) == (shard == "60KB")
    for name in names:
        if name.endswith(".json"):
            text = (tmp_path / "ours" / name).read_text()
            assert text == (tmp_path / "stock" / name).read_text()
            assert "quantization" not in text
            continue
        one, other = load_file(tmp_path / "stock" / name), load_file(tmp_path / "ours" / name)
        assert list(one) == list(other)
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key])
    again = class_of(checkpoints / kind).from_pretrained(tmp_path / "ours")
    assert torch.equal(generated(again), generated(stock))


def test_what_is_saved_loads_without_this_library(tiny, checkpoints, tmp_path) -> None:
    load(checkpoints / "experts", CPU, "cpu").save_pretrained(tmp_path / "saved")
    code = """if True:
        import sys
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        save_file(model.state_dict(), sys.argv[2])
        assert "hf_lowmem" not in sys.modules
    """
    tiny.python(code, str(tmp_path / "saved"), str(tmp_path / "state"))
    state = AutoModelForCausalLM.from_pretrained(checkpoints / "experts").state_dict()
    assert tiny.equal_bits(state, load_file(tmp_path / "state"))


# -- errors -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["/no/such/folder", "./nothere", "~/nothere", "a/b/c"])
@pytest.mark.parametrize("config", [CPU, LowMemConfig()], ids=["cpu", "none"])
def test_a_folder_that_does_not_exist(name, config) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no folder '{name}' to load a model from"):
        load(name, config, "cpu")


def test_a_model_that_the_hub_s_cache_lacks() -> None:
    with pytest.raises(OSError, match=r"couldn't find them in the cached files|nobody/nothing"):
        load("nobody/nothing", CPU, "cpu")


def test_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises((OSError, ValueError), match=tmp_path.name):
        load(tmp_path, CPU, "cpu")


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "something_else"])
def test_a_quantized_checkpoint_says_what_to_do(checkpoints, tmp_path, method) -> None:
    shutil.copytree(checkpoints / "untied", tmp_path / "q")
    settings = json.loads((tmp_path / "q/config.json").read_text())
    settings["quantization_config"] = {"quant_method": method}
    (tmp_path / "q/config.json").write_text(json.dumps(settings))
    message = rf"q is quantized \(quantization_config with quant_method='{method}'.*dequantize\(\).*offload=\"none\""
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "q", CPU, "cpu")
    config = LlamaForCausalLM.config_class.from_pretrained(tmp_path / "q")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "q", CPU, "cpu", model_config=config)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"device_map": "auto"}, r"was given device_map: leave it out, and write device="),
        ({"tp_plan": "auto"}, r"was given tp_plan: leave it out"),
        ({"quantization_config": {"load_in_4bit": True}}, r"was given quantization_config: .*offload=\"none\""),
        ({"gguf_file": "x.gguf"}, r"was given gguf_file: leave it out"),
    ],
)
def test_arguments_that_are_refused(checkpoints, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        load(checkpoints / "untied", CPU, "cpu", **kwargs)


def test_a_model_without_blocks(tmp_path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "embedding_size": 8}
    AlbertForMaskedLM(AlbertConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)  # one block, used many times
    with pytest.raises(ValueError, match=r'AlbertForMaskedLM has no blocks that could be streamed.*offload="none"'):
        load(tmp_path, CPU, "cpu", model_class=AlbertForMaskedLM)
    assert streamer_of(load(tmp_path, LowMemConfig(), "cpu", model_class=AlbertForMaskedLM)) is None


@pytest.mark.parametrize("offload", ["cpu", "none"])
@pytest.mark.parametrize("kind", ["untied", "sharded"])
@pytest.mark.parametrize("how", ["cut", "garbled"])
def test_a_corrupt_file_is_named(checkpoints, tmp_path, kind, how, offload) -> None:
    shutil.copytree(checkpoints / kind, tmp_path / kind)
    file = sorted((tmp_path / kind).glob("*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(data[:-10] if how == "cut" else b"\xff" * 16 + data[16:])
    with pytest.raises(ValueError, match=rf"{file.name} is corrupt or incomplete .*: copy or download it anew"):
        load(tmp_path / kind, LowMemConfig(offload=offload), "cpu")


def test_a_missing_shard_is_named(checkpoints, tmp_path) -> None:
    shutil.copytree(checkpoints / "sharded", tmp_path / "sharded")
    file = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(OSError, match=file.name):
        load(tmp_path / "sharded", CPU, "cpu")


def test_memory_that_is_refused_ends_the_load_at_once(checkpoints, monkeypatch) -> None:
    asked = []

    def weights(self, number):
        asked.append(number)
        raise RuntimeError("no memory for you")

    monkeypatch.setattr(loading.RamShelf, "weights", weights)
    with pytest.raises(RuntimeError, match=r"^no memory for you$"):
        load(checkpoints / "untied", CPU, "cpu")
    assert len(asked) == 1
    monkeypatch.undo()
    assert_at_home(load(checkpoints / "untied", CPU, "cpu"))
