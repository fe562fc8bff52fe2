"""Models saved as torchao and bitsandbytes have them: stock transformers loads the very codes that the device saw.

The oracle is the model whose weights are what its codes say, saved and loaded as ordinary weights.
"""

from __future__ import annotations

import copy
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from test_coded import as_seen, build_moe
from test_streamed_trainer import fit

import hf_lowmem
from hf_lowmem import LowMemConfig, attach, detach, save_quantized
from hf_lowmem.attachment import streamer_of
from hf_lowmem.export import _others
from hf_lowmem.kernels.weights import FORMS, empty, encode, levels
from hf_lowmem.lowbit import layer_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
WAYS = pytest.mark.parametrize(
    ("format", "weights"), [("torchao", "int8"), ("torchao", "int4"), ("bitsandbytes", "int8")]
)
TOKENS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))


def codes_of(p: torch.Tensor, weights: str) -> tuple[torch.Tensor, torch.Tensor]:
    pair = empty(tuple(p.shape), FORMS[weights])
    encode(p.detach().contiguous(), FORMS[weights], *pair)
    return pair


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_holds(model, codes, weights: str, format: str) -> None:
    """Whether a loaded model has these codes, by layer, and no others."""
    kind = {"bitsandbytes": "Linear8bitLt"}.get(format, "Linear")
    for name, (wanted, scale) in codes.items():
        layer = model.get_submodule(name)
        assert type(layer).__name__ == kind
        if format == "bitsandbytes":
            assert torch.equal(layer.weight.data, wanted)
            assert torch.equal(layer.weight.SCB, scale.view(-1) * 127)
            continue
        assert torch.equal(layer.weight.qdata, wanted if weights == "int8" else levels(wanted, 32))
        assert torch.equal(layer.weight.scale, scale)
        assert layer.weight.scale.dtype == FORMS[weights].scale
        assert not layer.weight.zero_point.any()
    quantized = {
        name
        for name, m in model.named_modules()
        if type(m).__name__ == "Linear8bitLt" or hasattr(getattr(m, "weight", None), "qdata")
    }
    assert quantized == set(codes)


def assert_computes(model, oracle, weights: str, format: str) -> None:
    """Whether a loaded model computes what ordinary weights do, as near as its library's products come to that."""
    with torch.no_grad():
        found, wanted = (m(input_ids=TOKENS).logits.float() for m in (model, oracle))
    if weights == "int4":
        assert torch.equal(found, wanted)  # torchao decodes, then multiplies
    else:  # bitsandbytes has tokens in 8 bits as well; torchao scales what it has summed
        narrow = next(model.parameters()).dtype != torch.float32
        bound = 0.03 if format == "bitsandbytes" else 0.02 if narrow else 2e-6
        assert (found - wanted).abs().max() < bound * wanted.abs().max()


def ordinary(model, folder):
    """The oracle."""
    model.save_pretrained(folder)
    return loaded(folder)


@WAYS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offload", [None, "cpu", "0.5", "none"])
def test_stock_transformers_loads_the_codes(tiny, tmp_path, format, weights, dtype, offload) -> None:
    pytest.importorskip(format)
    model = tiny.model(num_hidden_layers=4, dtype=dtype, **WIDE)
    plain = copy.deepcopy(model)
    if offload is not None:
        attach(model, LowMemConfig(offload=offload, weights=weights))
    before = tiny.weights(model)
    saved = save_quantized(model, tmp_path / "q", weights if offload is None else None, format)
    assert len(saved.quantized) == 7 * 4
    assert saved.decoded == []
    assert tiny.equal_bits(before, tiny.weights(model))
    assert getattr(model.config, "quantization_config", None) is None
    back = loaded(tmp_path / "q")
    codes = {name: codes_of(plain.get_submodule(name).weight, weights) for name in saved.quantized}
    assert_holds(back, codes, weights, format)
    oracle = ordinary(as_seen(plain, weights), tmp_path / "o")
    assert back.dtype == oracle.dtype
    assert_computes(back, oracle, weights, format)
    if format == "torchao":
        for name in codes:
            assert torch.equal(back.get_submodule(name).weight.dequantize(), oracle.get_submodule(name).weight)
    else:
        from bitsandbytes.functional import int8_vectorwise_dequant

        for name, (wanted, scale) in codes.items():
            state = back.get_submodule(name).state
            read = int8_vectorwise_dequant(state.CB, state.SCB)
            torch.testing.assert_close(read, wanted * scale, rtol=2**-22, atol=0)


@WAYS
def test_where_we_are_not(tiny, tmp_path, format, weights) -> None:
    pytest.importorskip(format)
    model = tiny.model(dtype="bfloat16", **WIDE)
    save_quantized(model, tmp_path, weights, format, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)\n"
        "assert 'hf_lowmem' not in sys.modules\n"
        "torch.save([model.model.layers[1].mlp.up_proj.weight.data], sys.argv[2])"
    )
    tiny.python(code, str(tmp_path), str(tmp_path / "found"))
    (found,) = torch.load(tmp_path / "found", weights_only=False)
    wanted = codes_of(model.model.layers[1].mlp.up_proj.weight, weights)[0]
    found = getattr(found, "qdata", found)
    assert torch.equal(found, wanted if weights == "int8" else levels(wanted, 32))


@pytest.mark.parametrize("master_bits", [24, 8])
@pytest.mark.parametrize("offload", ["cpu", "0.5"])
@pytest.mark.parametrize("format", ["torchao", "bitsandbytes"])
def test_what_was_trained(tiny, tmp_path, format, offload, master_bits) -> None:
    pytest.importorskip(format)
    optim_args = f"weights=int8,master_bits={master_bits},compute=int8"
    changes = {"optim": "cpu_adam4bit", "dtype": "bfloat16", "max_steps": 2, "learning_rate": 1e-2}
    model = fit(tiny, tmp_path, offload, optim_args=optim_args, **changes).model.eval()
    saved = save_quantized(model, tmp_path / "q", format=format)
    found = {name: model.get_submodule(name).weight for name in saved.quantized}
    if master_bits == 8:
        alone = streamer_of(model).codes()
        codes = {name: tuple(part.clone() for part in alone[p]) for name, p in found.items()}
        assert any((pair[0].abs().amax(1) < 127).any() for pair in codes.values())  # no codes of what they say
    else:
        codes = {name: codes_of(p, "int8") for name, p in found.items()}
    back = loaded(tmp_path / "q")
    assert_holds(back, codes, "int8", format)
    detach(model)
    hf_lowmem.dequantize(model)
    oracle = ordinary(model if master_bits == 8 else as_seen(model, "int8"), tmp_path / "o")
    assert_computes(back, oracle, "int8", format)


@WAYS
@pytest.mark.parametrize("master_bits", [24, 8])
def test_what_has_no_place_is_what_its_codes_say(tmp_path, format, weights, master_bits) -> None:
    """Experts of three dimensions. Routers and heads are what they were."""
    pytest.importorskip(format)
    model = build_moe().eval()
    plain = copy.deepcopy(model)
    if master_bits != 8 or weights == "int8":
        attach(model, LowMemConfig(offload="cpu", weights=weights, master_bits=master_bits))
    saved = save_quantized(model, tmp_path / "q", weights, format)
    assert len(saved.quantized) == 4 * 4
    assert {name.rsplit(".", 2)[-2] for name in saved.decoded} == {"experts"}
    assert len(saved.decoded) == 2 * 4
    back = loaded(tmp_path / "q")
    codes = {name: codes_of(plain.get_submodule(name).weight, weights) for name in saved.quantized}
    assert_holds(back, codes, weights, format)
    oracle = as_seen(plain, weights)
    for name, p in oracle.named_parameters():
        if name.rpartition(".")[0] not in saved.quantized:
            assert torch.equal(back.get_parameter(name), p), name
    assert_computes(back, oracle, weights, format)


def test_waits_for_updates(tiny, tmp_path) -> None:
    """An update that is not over yet: it writes a weight when it is waited for."""
    pytest.importorskip("torchao")
    model = tiny.model()
    streamer = attach(model, LowMemConfig(offload="cpu", weights="int8"))
    p = model.model.layers[0].mlp.up_proj.weight
    streamer.updates = SimpleNamespace(synchronize=lambda: p.data.fill_(0.5))
    save_quantized(model, tmp_path)
    streamer.updates = None
    read = loaded(tmp_path).model.layers[0].mlp.up_proj.weight.dequantize()
    assert (read - 0.5).abs().max() < 1e-4


def test_layers_that_the_device_sees_whole_stay_so(tiny, tmp_path) -> None:
    pytest.importorskip("torchao")
    model = tiny.model(tie_word_embeddings=True)  # keys and values have 32 outputs
    saved = save_quantized(model, tmp_path, "int8")
    assert not any("k_proj" in name or "v_proj" in name for name in saved.quantized)
    back = loaded(tmp_path)
    assert back.lm_head.weight is back.model.embed_tokens.weight
    listed = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.layers.1.self_attn.k_proj"} <= set(listed)
    for name, p in model.named_parameters():
        if name.rpartition(".")[0] not in saved.quantized:
            assert torch.equal(back.get_parameter(name), p), name


def test_names_that_begin_or_end_others() -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.gate_proj, self.proj = (torch.nn.Linear(2, 2) for _ in range(3))

    model = torch.nn.ModuleDict({"mlp": Layer(), "proj": torch.nn.Linear(2, 2)})
    layers = ["mlp.gate_proj", "mlp.proj"]
    patterns = _others(model, layers)
    for name, _ in model.named_parameters():
        layer = name.rpartition(".")[0]
        for asked in (name, layer):
            assert should_convert_module(asked, patterns) == (layer in layers), asked


def test_a_classifier(tiny, tmp_path) -> None:
    pytest.importorskip("torchao")
    from transformers import LlamaForSequenceClassification

    config = tiny.model(**WIDE).config
    model = LlamaForSequenceClassification(config).eval()
    save_quantized(model, tmp_path, "int4")
    back = LlamaForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(back.score.weight, model.score.weight)
    wanted = as_seen(model, "int4")(input_ids=TOKENS[:1]).logits
    assert torch.equal(back(input_ids=TOKENS[:1]).logits, wanted)


def test_refused(tiny, tmp_path, monkeypatch) -> None:
    model = tiny.model()
    with pytest.raises(ValueError, match="format='gguf' is neither"):
        save_quantized(model, tmp_path, "int8", "gguf")
    with pytest.raises(ValueError, match="weights='int3': write weights="):
        save_quantized(model, tmp_path, "int3")
    with pytest.raises(ValueError, match="weights is not given, and the model is not attached with any"):
        save_quantized(model, tmp_path)
    with pytest.raises(ValueError, match=r'nf4, fp4.*write format="torchao"'):
        save_quantized(model, tmp_path, "int4", "bitsandbytes")
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        save_quantized(torch.nn.Linear(64, 64), tmp_path, "int8")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        save_quantized(model, tmp_path / "file", "int8")
    attach(model, LowMemConfig(offload="cpu", weights="int8"))
    with pytest.raises(ValueError, match='attached with weights="int8", and would be another'):
        save_quantized(model, tmp_path, "int4")
    for name in ("torchao", "bitsandbytes"):
        with monkeypatch.context() as context:
            for module in [m for m in sys.modules if m.partition(".")[0] == name]:
                context.delitem(sys.modules, module)
            context.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=f'pip install "{name}>='):
                save_quantized(model, tmp_path, "int8", name)


def test_models_that_have_no_such_layer_or_more_than_layers(tiny, tmp_path) -> None:
    pytest.importorskip("torchao")
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ValueError, match="no linear layer that torchao could hold as int8"):
        save_quantized(GPT2LMHeadModel(config), tmp_path, "int8")
    with pytest.raises(ValueError, match="no weight that could be written as int8"):
        save_quantized(tiny.model(hidden_size=32, intermediate_size=32), tmp_path, "int8")
    adapted = get_peft_model(tiny.model(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has adapters"):
        save_quantized(adapted, tmp_path, "int8")
    merged = adapted.merge_and_unload()
    assert layer_weights(merged)
    save_quantized(merged, tmp_path / "q", "int8")
    with pytest.raises(ValueError, match="is quantized by another library"):
        save_quantized(loaded(tmp_path / "q"), tmp_path / "again", "int8")
    changed = tiny.model()
    changed.model.layers[0].more = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"not what its config makes.*model\.layers\.0\.more"):
        save_quantized(changed, tmp_path, "int8")
