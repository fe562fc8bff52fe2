r"""The same with LowMemTrainer, whose settings are a LowMemConfig instead of a string.

    python examples/finetune_lowmem_trainer.py --model HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt \
        --output_dir out --learning_rate 2e-5 --state_bits 8 --threads 4

LowMemConfig's fields are flags beside those of TrainingArguments, whose --seed is that of stochastic rounding too.
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


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments, LowMemConfig))
    script, arguments, lowmem = parser.parse_args_into_dataclasses()

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
