"""A random Llama of some 30,000 parameters with a byte-level tokenizer, saved as `from_pretrained` wants it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_tiny_model(folder: Path, dtype: torch.dtype = torch.float32, hidden: int = 32) -> Path:
    """Writes weights, config and tokenizer into `folder` and returns it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=4096).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def save_text(path: Path, paragraphs: int = 60) -> Path:
    """Writes English-like text whose paragraphs all differ, and returns the path."""
    sentence = "the model reads a line of text and learns what comes next after every word of it"
    words = sentence.split()
    lines = []
    for i in range(paragraphs):
        turned = words[i % len(words) :] + words[: i % len(words)]
        lines.append(f"{i}: " + " ".join(turned) + ".")
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path
