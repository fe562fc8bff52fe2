"""What the quality benchmarks share: a real pretrained model, real text, and one short fine-tuning run.

The model is SmolLM2-135M-Instruct (or --model), the text this Python's help texts and standard library; every tenth
file is held out. The model computes in bf16; how its weights and moments are kept is the recipe under test.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_lowmem.attachment import detach, streamer_of
from hf_lowmem.demo_data import find_model, heldout_split, read_texts
from hf_lowmem.lowbit import dequantize, rounding_of

SEQ, BATCH, HELDOUT = 512, 16, 256
Step = Callable[[float], None]  # one optimizer step at a learning rate; the gradients are in the model


class Finetune:
    """One model and its text.

    Args:
        model: what `hf-lowmem demo --model` takes.
        device: where it computes.
    """

    def __init__(self, model: str | None, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source = find_model(model)
        extra = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        tokenizer = AutoTokenizer.from_pretrained(source.name, **extra)
        if source.gguf_file:
            extra["quantization_config"] = GgufConfig(gguf_file=source.gguf_file, dequantize=True)
        loaded = AutoModelForCausalLM.from_pretrained(source.name, dtype=torch.float32, **extra).to(device)
        self.origin, self.device = source.origin, device
        self.adapted: Any = None  # by PEFT, while a recipe trains adapters
        self.model: nn.Module = loaded.to(torch.bfloat16)
        # Every recipe starts from what a bf16 checkpoint holds: at small learning rates it matters where between two
        # bf16 values a master starts.
        self.start = {name: p.detach().float() for name, p in loaded.named_parameters()}
        self.params = dict(self.model.named_parameters())
        self.train, self.heldout = (x.to(device) for x in _tokens(tokenizer))

    def loss(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids).logits
        return F.cross_entropy(logits[:, :-1].float().reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean held-out loss in nats a token."""
        losses = [self.loss(part) * len(part) for part in self.heldout.split(BATCH)]
        return torch.stack(losses).sum().item() / len(self.heldout)

    def run(self, step: Step, lr: float, steps: int, seed: int) -> float:
        """Trains from the pretrained weights, in the order of `seed`, and returns the held-out loss.

        Warm-up over 10 steps, cosine down to a tenth of `lr`, gradients clipped to norm 1.
        """
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed)).tolist()
        for number in range(steps):
            rate = lr * min(1.0, (number + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * number / steps))
            picked = [order[(number * BATCH + i) % len(order)] for i in range(BATCH)]
            self.model.zero_grad()
            self.loss(self.train[picked]).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            step(rate)
        found = self.evaluate()
        if rounding_of(self.model) is not None or streamer_of(self.model) is not None:
            self._be_ordinary()  # as what is saved is
            print(f"evaluated as it was trained {found:.5f}, as it is saved {self.evaluate():.5f}")
        return found

    def _be_ordinary(self) -> None:
        if streamer_of(self.model) is not None:
            detach(self.model)
            self.model.to(self.device)
        dequantize(self.model)
        if self.adapted is not None:
            self.adapted.unload()
            self.adapted = None
        for p in self.params.values():
            p.requires_grad_()

    @torch.no_grad()
    def reset(self) -> None:
        self._be_ordinary()
        for name, p in self.params.items():
            p.copy_(self.start[name])


def _tokens(tokenizer) -> tuple[Tensor, Tensor]:
    folder = Path(os.__file__).parent
    files = sorted([*folder.glob("*.py"), *folder.glob("asyncio/*.py"), *folder.glob("email/*.py")])
    sources = [f.read_text(encoding="utf-8", errors="ignore") for f in files]
    train, held = heldout_split(read_texts(None))
    sides = ([train], [held])
    for number, text in enumerate(sources):
        sides[number % 10 == 9].append(text)

    def blocks(texts: list[str]) -> Tensor:
        ids = torch.cat([torch.tensor(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts])
        return ids[: len(ids) // SEQ * SEQ].view(-1, SEQ)

    heldout = blocks(sides[1])
    picked = torch.randperm(len(heldout), generator=torch.Generator().manual_seed(9))[:HELDOUT]
    return blocks(sides[0]), heldout[picked]


def compare(
    data: Finetune,
    recipes: dict[str, Callable[[int], Step]],
    lr: float,
    steps: int,
    seeds: list[int],
    budget_s: float,
    known: Path | None = None,
) -> dict[str, list[float]]:
    """Held-out losses of every recipe, one a seed; the seed is the outer loop, so that all recipes see all seeds.

    Args:
        recipes: name to a function that, given the seed, resets the model and returns its step.
        budget_s: no new run starts after this many seconds.
        known: a JSON file {learning rate: {recipe: {seed: loss}}}; it is not run again, but extended.
    """
    results = json.loads(known.read_text()) if known and known.exists() else {}
    losses: dict[str, dict[str, float]] = results.setdefault(f"{lr:g}", {})
    begin = time.monotonic()
    for seed in seeds:
        for name, make in recipes.items():
            found = losses.setdefault(name, {})
            if str(seed) in found or time.monotonic() - begin > budget_s:
                continue
            start = time.monotonic()
            data.reset()
            found[str(seed)] = round(data.run(make(seed), lr, steps, seed), 5)
            print(f"seed {seed} {name:40s} {found[str(seed)]:.5f}  {time.monotonic() - start:.1f} s", flush=True)
            if known:
                known.write_text(json.dumps(results, indent=1))
    return {name: [losses[name][str(s)] for s in seeds if str(s) in losses[name]] for name in recipes}


def table(losses: dict[str, list[float]], before: float) -> str:
    """A Markdown table: mean loss, ratio to the first recipe seed by seed, learned share."""
    reference = next(iter(losses.values()))
    lines = [
        "| recipe | held-out loss, mean | by seed | ratio to fp32, mean | worst seed | learned, of fp32's |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in losses.items():
        if not found:
            continue
        ratios = [x / r for x, r in zip(found, reference, strict=False)]
        mean, ref = sum(found) / len(found), sum(reference[: len(found)]) / len(found)
        lines.append(
            f"| {name} | {mean:.4f} | {' '.join(f'{x:.4f}' for x in found)} | {sum(ratios) / len(ratios):.5f} | "
            f"{max(ratios):.5f} | {(before - mean) / (before - ref):.1%} |"
        )
    spread = (max(reference) - min(reference)) / (sum(reference) / len(reference))
    return "\n".join(lines) + f"\n\nfp32's own spread over the seeds: {spread:.3%} of its loss. Before: {before:.4f}.\n"
