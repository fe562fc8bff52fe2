"""Tiny models of many architectures, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from test_attachment import checkpoint, gradients
from torch import nn

Batch = dict[str, torch.Tensor]
IMAGE = 125  # the token in whose place an image goes
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "output_router_logits": True,
    "router_aux_loss_coef": 1.0,
}
MAMBA = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")}
MAMBA |= {"num_hidden_layers": 4, "state_size": 4}
SEQ2SEQ = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 8}


# -- batches ------------------------------------------------------------------------------------------------------
def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int, length: int = 8) -> torch.Tensor:
    return torch.randint(3, 120, (2, length), generator=seeded(seed))


def text(step: int) -> Batch:
    """The second sequence is padded, on the left as generate() wants it."""
    ids = tokens(step)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded(step: int) -> Batch:
    ids = tokens(step)
    return {"input_ids": ids, "labels": ids}


def pairs(step: int) -> Batch:
    return {"input_ids": tokens(step), "labels": tokens(step + 50, 6)}


def classes(step: int) -> Batch:
    return {"input_ids": tokens(step), "labels": torch.tensor([0, 1])}


def pictures(step: int) -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=seeded(step)), "labels": torch.tensor([0, 1])}


def spectra(step: int) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=seeded(step)), "labels": tokens(step, 6)}


def sounds(step: int) -> Batch:
    return {"input_values": torch.randn(2, 800, generator=seeded(step)), "labels": tokens(step, 4)}


def mixed(size: tuple[int, ...], count: int, **more: Any) -> Callable[[int], Batch]:
    """Steps of even numbers have an image of ``count`` tokens, the others are text alone."""

    def batch(step: int) -> Batch:
        ids = tokens(step, 12)
        if step % 2:
            return {"input_ids": ids, "labels": ids}
        seen = ids.clone()
        seen[:, 2 : 2 + count] = IMAGE
        given = {name: torch.tensor(value) for name, value in more.items()}
        return {"input_ids": seen, "labels": ids, "pixel_values": torch.randn(size, generator=seeded(step)), **given}

    return batch


# -- models -------------------------------------------------------------------------------------------------------
@dataclass
class Case:
    """One architecture.

    Args:
        build: makes the model, in float32.
        batch: its micro-batch of a step.
        generates: whether it has ``generate()``.
        checkpoints: whether transformers can checkpoint it.
        steps: the micro-batches that are accumulated.
        reason: why it is not exact today.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch] = text
    generates: bool = True
    checkpoints: bool = True
    steps: tuple[int, ...] = (0, 1)


def make(name: str, sizes: dict[str, Any] = SIZES, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model_class = getattr(transformers, name)
        return model_class(model_class.config_class(**{**sizes, **changes}))

    return build


def adapted(base: Callable[[], nn.Module], **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(base(), LoraConfig(init_lora_weights=False, **{"r": 4, **changes}))

    return build


def frozen(base: Callable[[], nn.Module], trained: Callable[[str], bool]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = base()
        for name, p in model.named_parameters():
            p.requires_grad_(trained(name))
        return model

    return build


def resized() -> nn.Module:
    model = make("LlamaForCausalLM", tie_word_embeddings=True)()
    model.resize_token_embeddings(150, mean_resizing=False)
    return model


def dual_encoder(name: str, **more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config_class = getattr(transformers, f"{name}Config")
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        texts = {**SIZES, "rope_parameters": rope, "head_dim": 8, "intermediate_size": 512}
        vision = {"depth": 3, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, **more}
        special = {"image_token_id": IMAGE, "video_token_id": 124, "vision_start_token_id": 123}
        config = config_class(text_config=texts, vision_config=vision, vision_end_token_id=122, **special)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return build


def llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=transformers.LlamaConfig(**SIZES),
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def idefics() -> nn.Module:
    config = transformers.Idefics3Config(
        vision_config={**VISION, "patch_size": 4},
        text_config=transformers.LlamaConfig(**SIZES),
        image_token_id=IMAGE,
        scale_factor=2,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


class Counting(nn.Module):
    """A block with statistics that it writes, as BatchNorm's, and a constant that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.norm(self.linear(x)) * self.scale.to(x.dtype)


class Chain(nn.Module):
    """Blocks of one's own between two layers. ``call`` takes the blocks and the first layer's output."""

    def __init__(self, block: Callable[[], nn.Module], call: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.first, self.last, self.call = nn.Linear(8, 8), nn.Linear(8, 1), call
        self.blocks = nn.ModuleList([block() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> Any:
        return transformers.utils.ModelOutput(loss=self.last(self.call(self.blocks, self.first(x))).square().sum())


def in_turn(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def vectors(step: int) -> Batch:
    return {"x": torch.randn(3, 8, generator=seeded(step))}


LLAMA = make("LlamaForCausalLM")
QWEN_EXPERTS = make("Qwen3MoeForCausalLM", head_dim=8, **EXPERTS)
ALTERNATE = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8}
SHARED_KV = {**ALTERNATE, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6}
SHARED_KV |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
HYBRID = {"layers_block_type": ["mamba", "hybrid"] * 3, "num_hidden_layers": 6, "num_key_value_heads": 4}
HYBRID |= {"mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 4}
HYBRID |= {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 4}
GRID = {"image_grid_thw": [[1, 2, 2]] * 2, "mm_token_type_ids": [[0, 0, 1] + [0] * 9] * 2}
WAVES = {"conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_conv_pos_embeddings": 4}
WAVES |= {"num_conv_pos_embedding_groups": 2, "layerdrop": 0.3, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "head_dim": 4,
}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"layer_types": ["linear_attention", "full_attention"] * 2, "shared_expert_intermediate_size": 32}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
T5 = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
CASES = {
    "llama": Case(LLAMA),
    "qwen3": Case(make("Qwen3ForCausalLM", head_dim=8)),
    "gemma2": Case(make("Gemma2ForCausalLM", **ALTERNATE)),
    "gemma3": Case(make("Gemma3ForCausalLM", **ALTERNATE)),
    "gemma3n": Case(
        make("Gemma3nForCausalLM", **SHARED_KV, laurel_rank=4, activation_sparsity_pattern=[0.5] + [0.0] * 5)
    ),
    "gemma4": Case(make("Gemma4ForCausalLM", **SHARED_KV, global_head_dim=8)),
    "gpt2": Case(make("GPT2LMHeadModel")),
    "bloom": Case(make("BloomForCausalLM")),
    "opt with dropped layers": Case(make("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.3)),
    "mixtral": Case(make("MixtralForCausalLM", num_local_experts=4, **EXPERTS)),
    "qwen3-moe": Case(QWEN_EXPERTS),
    "gpt-oss": Case(make("GptOssForCausalLM", num_local_experts=4, head_dim=8, **EXPERTS)),
    "deepseek-v3": Case(make("DeepseekV3ForCausalLM", **LATENT)),
    "qwen3-next": Case(make("Qwen3NextForCausalLM", head_dim=8, **DELTA, **EXPERTS)),
    "mamba": Case(make("MambaForCausalLM", MAMBA)),
    "mamba2": Case(make("Mamba2ForCausalLM", MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=4)),
    "rwkv rescaled": Case(make("RwkvForCausalLM", rescale_every=2)),
    "zamba2 with shared blocks": Case(make("Zamba2ForCausalLM", **HYBRID)),
    "dory with loops": Case(make("DoryForCausalLM", head_dim=8), unpadded),
    "t5": Case(make("T5ForConditionalGeneration", T5, decoder_start_token_id=0), pairs),
    "bart": Case(make("BartForConditionalGeneration", SEQ2SEQ), pairs),
    "whisper": Case(make("WhisperForConditionalGeneration", SEQ2SEQ, **WHISPER), spectra),
    "bert classes": Case(make("BertForSequenceClassification"), classes, generates=False),
    "llama classes": Case(make("LlamaForSequenceClassification"), classes, generates=False),
    "deberta-v2": Case(
        make("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]), generates=False
    ),
    "albert": Case(make("AlbertForMaskedLM", num_hidden_groups=2), generates=False, checkpoints=False),
    "xlnet": Case(make("XLNetLMHeadModel", n_head=4, d_head=8, d_inner=64), generates=False, checkpoints=False),
    "vit": Case(make("ViTForImageClassification", VISION), pictures, generates=False),
    "swin": Case(make("SwinForImageClassification", SWIN), pictures, generates=False),
    "wav2vec2": Case(make("Wav2Vec2ForCTC", **WAVES), sounds, generates=False),
    "llava": Case(llava, mixed((2, 3, 16, 16), 4), steps=(1, 0, 1)),
    "idefics3": Case(idefics, mixed((2, 1, 3, 16, 16), 4), steps=(1, 0, 1)),
    "qwen2-vl": Case(dual_encoder("Qwen2VL", embed_dim=32), mixed((8, 96), 1, **GRID), steps=(1, 0, 1)),
    "qwen3-vl": Case(
        dual_encoder("Qwen3VL", intermediate_size=256, out_hidden_size=32, deepstack_visual_indexes=[0, 1]),
        mixed((8, 96), 1, **GRID),
        steps=(1, 0, 1),
    ),
    "lora": Case(adapted(LLAMA, target_modules="all-linear")),
    "small lora": Case(adapted(LLAMA, r=1, target_modules=["q_proj"])),
    "dora": Case(adapted(LLAMA, target_modules="all-linear", use_dora=True)),
    "lora of experts": Case(
        adapted(QWEN_EXPERTS, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    ),
    "resized embeddings": Case(resized),
    "frozen vision": Case(frozen(llava, lambda name: "vision" not in name), mixed((2, 3, 16, 16), 4)),
    "frozen first half": Case(frozen(LLAMA, lambda name: not any(s in name for s in ("embed", ".0.", ".1.")))),
    "one block trained": Case(frozen(LLAMA, lambda name: ".1." in name)),
    "norms trained": Case(frozen(LLAMA, lambda name: "norm" in name)),
    "head trained": Case(frozen(LLAMA, lambda name: "lm_head" in name)),
    "frozen decoder": Case(
        frozen(make("BartForConditionalGeneration", SEQ2SEQ), lambda name: ".encoder.layers." in name),
        pairs,
    ),
    "buffers": Case(lambda: Chain(Counting, in_turn), vectors, generates=False, checkpoints=False),
}


def model_of(case: Case, checkpointing: str = "off", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = case.build().to(dtype).train()
    checkpoint(model.get_base_model() if hasattr(model, "get_base_model") else model, checkpointing)
    return model


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def run(model: nn.Module, case: Case, dtype: torch.dtype = torch.float32) -> tuple[list[float], Batch]:
    torch.manual_seed(7)
    losses = []
    for step in case.steps:
        loss = model(**cast(case.batch(step), dtype)).loss
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)
