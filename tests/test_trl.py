"""TRL: the optim names in SFTConfig and DPOConfig, and LowMemMixin in front of their trainers."""

from __future__ import annotations

import re

import pytest

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from hf_lowmem import LowBitAdamW, LowMemMixin  # noqa: E402
from hf_lowmem.attachment import streamer_of  # noqa: E402

# TRL and PEFT still use the old names of what transformers now calls activation checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
WORDS = [f"w{i}" for i in range(120)]


class MySFT(LowMemMixin, trl.SFTTrainer):
    pass


class MyDPO(LowMemMixin, trl.DPOTrainer):
    pass


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def text():
    return datasets.Dataset.from_list([{"text": " ".join(WORDS[i : i + 12])} for i in range(24)])


@pytest.fixture(scope="module")
def preferences():
    rows = [
        {"prompt": " ".join(WORDS[i : i + 4]), "chosen": " " + " ".join(WORDS[i + 4 : i + 8]), "rejected": " w1 w2 w3"}
        for i in range(24)
    ]
    return datasets.Dataset.from_list(rows)


def settings(folder, **changes):
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "max_length": 32,
        **changes,
    }


def sft(tiny, folder, text, tokenizer, cls, lowmem=None, **changes):
    given = {} if lowmem is None else {"lowmem": lowmem}
    args = trl.SFTConfig(**settings(folder, **changes))
    trainer = cls(model=tiny.model(), args=args, train_dataset=text, processing_class=tokenizer, **given)
    trainer.train()
    return trainer


def dpo(tiny, folder, preferences, tokenizer, cls, **changes):
    args = trl.DPOConfig(**settings(folder, **changes))
    trainer = cls(
        model=tiny.model(), ref_model=tiny.model(), args=args, train_dataset=preferences, processing_class=tokenizer
    )
    trainer.train()
    return trainer


def states_and_losses(trainer):
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, LowBitAdamW)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {state["bits"] for state in optimizer.state.values()}, losses


def test_command_line():
    parser = trl.TrlParser(trl.SFTConfig)
    (args,) = parser.parse_args_and_config(["--output_dir", "x", "--use_cpu", "--optim", "cpu_adam8bit"])
    assert args.optim == "cpu_adam8bit"


def test_stock_sft(tiny, tmp_path, text, tokenizer):
    trainer = sft(tiny, tmp_path, text, tokenizer, trl.SFTTrainer, optim="cpu_adam4bit", optim_args="threads=1")
    bits, losses = states_and_losses(trainer)
    assert bits == {4, 8, 32}
    assert losses[-1] < losses[0]


def test_mixin_sft_clips_as_stock_sft(tiny, tmp_path, text, tokenizer):
    changes = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
    stock = sft(tiny, tmp_path, text, tokenizer, trl.SFTTrainer, optim="adamw_torch", **changes)
    ours = sft(tiny, tmp_path, text, tokenizer, MySFT, lowmem={"state_bits": 32}, **changes)
    bits, _ = states_and_losses(ours)
    assert bits == {32}
    for key in ("loss", "grad_norm", "learning_rate"):
        wanted, got = ([e[key] for e in run.state.log_history if key in e] for run in (stock, ours))
        assert got == pytest.approx(wanted, rel=1e-6)  # tests/test_trainer.py has the reason


def test_mixin_sft_takes_four_bits_by_default(tiny, tmp_path, text, tokenizer):
    trainer = sft(tiny, tmp_path, text, tokenizer, MySFT, bf16=True)  # TRL's own default
    bits, losses = states_and_losses(trainer)
    assert bits == {4, 8, 32}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("cls", [trl.DPOTrainer, MyDPO])
def test_dpo(tiny, tmp_path, preferences, tokenizer, cls):
    trainer = dpo(tiny, tmp_path, preferences, tokenizer, cls, optim="cpu_adam4bit")
    bits, losses = states_and_losses(trainer)
    assert bits == {4, 8, 32}
    assert losses[-1] < losses[0]


def test_contradictions_before_the_data_is_tokenized(tiny, tmp_path, tokenizer):
    args = trl.SFTConfig(**settings(tmp_path, optim="cpu_adam4bit"))
    with pytest.raises(ValueError, match=re.escape('write optim="cpu_adam8bit"')):
        MySFT(tiny.model(), args, train_dataset=None, processing_class=tokenizer, lowmem={"state_bits": 8})


def test_lora(tiny, tmp_path, text, tokenizer):
    """Adapters are small tensors: 32 bits each; frozen weights have no state."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.model(), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    args = trl.SFTConfig(**settings(tmp_path, optim="cpu_adam4bit", save_strategy="steps", save_steps=2))
    trainer = MySFT(model=model, args=args, train_dataset=text, processing_class=tokenizer)
    trainer.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainer.optimizer.optimizer.nbytes()["parameters"] == sum(p.numel() for p in trainable)
    first = [p.detach().clone() for p in trainable]
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all((a == b).all() for a, b in zip(first, trainable, strict=True))


def log(trainer, *names):
    return [[entry[name] for name in names] for entry in trainer.state.log_history if names[0] in entry]


def test_streamed_sft_is_unstreamed(tiny, tmp_path, text, tokenizer):
    """bf16 over fp32 weights, TRL's default, with its activation checkpointing."""
    runs = [
        sft(
            tiny,
            tmp_path,
            text,
            tokenizer,
            MySFT,
            lowmem={"offload": offload},
            bf16=True,
            gradient_accumulation_steps=2,
        )
        for offload in ("none", "cpu")
    ]
    assert streamer_of(runs[1].model) is not None
    assert tiny.equal_bits(*(tiny.weights(run.model) for run in runs))
    assert log(runs[0], "loss", "grad_norm") == log(runs[1], "loss", "grad_norm")


def test_streamed_dpo_streams_its_reference_too(tiny, tmp_path, preferences, tokenizer):
    runs = [
        dpo(tiny, tmp_path, preferences, tokenizer, MyDPO, optim="cpu_adam4bit", optim_args=f"offload={offload}")
        for offload in ("none", "cpu")
    ]
    streamers = [streamer_of(m) for m in (runs[1].model, runs[1].ref_model)]
    assert None not in streamers
    assert streamers[0] is not streamers[1]
    assert tiny.equal_bits(*(tiny.weights(run.model) for run in runs))
    assert tiny.equal_bits(*(tiny.weights(run.ref_model) for run in runs))
    assert log(runs[0], "loss", "rewards/margins") == log(runs[1], "loss", "rewards/margins")
