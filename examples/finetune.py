r"""Full fine-tuning on text files with the stock Trainer: the import and the optim name are all that is special.

    python examples/finetune.py --model HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt \
        --optim cpu_adam4bit --output_dir out --learning_rate 2e-5 --num_train_epochs 1

Every flag of TrainingArguments works, and so does a YAML or JSON file of them in the place of the flags.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import hf_lowmem  # noqa: F401  (makes the optim names known)


@dataclass
class ScriptArguments:
    model: str = field(metadata={"help": "A model's folder or hub name."})
    text: list[str] = field(metadata={"help": "UTF-8 text files to train on."})
    dtype: str = field(default="auto", metadata={"help": "Of the weights: auto, bfloat16, float16 or float32."})
    block: int = field(default=512, metadata={"help": "Tokens an example."})


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith((".yaml", ".yml")):
        script, arguments = parser.parse_yaml_file(sys.argv[1])
    elif len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        script, arguments = parser.parse_json_file(sys.argv[1])
    else:
        script, arguments = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model, dtype=script.dtype)
    text = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in script.text)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    blocks = ids[: len(ids) // script.block * script.block].view(-1, script.block)

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
