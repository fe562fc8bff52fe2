r"""The same with LowMemTrainer, whose settings are a LowMemConfig instead of a string.

    python examples/finetune_lowmem_trainer.py --model HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt \
        --output_dir out --learning_rate 2e-5 --state_bits 8 --threads 4

The settings are flags of this script, handed on one by one: LowMemConfig beside TrainingArguments in one parser would
bring a second --seed, which argparse refuses. Here --seed sets both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments, default_data_collator

from hf_lowmem import LowMemConfig, LowMemTrainer


@dataclass
class ScriptArguments:
    model: str = field(metadata={"help": "A model's folder or hub name."})
    text: list[str] = field(metadata={"help": "UTF-8 text files to train on."})
    dtype: str = field(default="auto", metadata={"help": "Of the weights: auto, bfloat16, float16 or float32."})
    block: int = field(default=512, metadata={"help": "Tokens an example."})
    state_bits: int = field(default=4, metadata={"help": "Of each AdamW moment: 4, 8 or 32."})
    master_bits: int = field(default=24, metadata={"help": "Of the master of a 16-bit weight: 16, 24 or 32."})
    threads: int | None = field(default=None, metadata={"help": "Of the optimizer; default: physical cores less one."})


def main() -> None:
    script, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    lowmem = LowMemConfig(
        state_bits=script.state_bits,
        master_bits=script.master_bits,
        threads=script.threads,
        seed=arguments.seed,
    )

    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model, dtype=script.dtype)
    text = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in script.text)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    blocks = ids[: len(ids) // script.block * script.block].view(-1, script.block)

    trainer = LowMemTrainer(
        model=model,
        args=arguments,
        lowmem=lowmem,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
