r"""A training loop of one's own with Accelerate.

    accelerate launch examples/accelerate_loop.py --model HuggingFaceTB/SmolLM2-135M-Instruct \
        --text book.txt --output out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from hf_lowmem import LowMemConfig, create_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model's folder or hub name")
    parser.add_argument("--text", required=True, nargs="+", help="UTF-8 text files to train on")
    parser.add_argument("--output", required=True, help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--block", type=int, default=512, help="tokens an example")
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step")
    parser.add_argument("--lr", type=float, default=2e-5)
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    text = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in options.text)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    blocks = ids[: len(ids) // options.block * options.block].view(-1, options.block)
    loader: DataLoader[torch.Tensor] = DataLoader(blocks, batch_size=options.batch, shuffle=True, drop_last=True)  # type: ignore[arg-type]

    optimizer = create_optimizer(model, LowMemConfig(state_bits=4), lr=options.lr)
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, options.steps // 10), options.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    model.train()
    step = 0
    while step < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step}: loss {loss.item():.4f}")
                if step == options.steps:
                    break

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(options.output, is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
