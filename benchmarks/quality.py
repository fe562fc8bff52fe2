"""How much loss each recipe of LowBitAdamW costs, against AdamW with fp32 states and weights.

    python benchmarks/quality.py --out benchmarks/results/quality.md

A real pretrained model on real text (finetune.py), several seeds, two learning rates: a usual one, where the moments
count, and 1e-6, where the weights' last bits do.
"""

from __future__ import annotations

import argparse
import itertools
import platform
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from finetune import Finetune, Step, compare, table

from hf_lowmem import LowMemConfig, attach
from hf_lowmem.kernels import native
from hf_lowmem.lowbit import layer_weights, number_steps, quantize
from hf_lowmem.optim import LowBitAdamW, param_bits


def over_masters(data: Finetune, make: Callable[[list], torch.optim.Optimizer], round_to: torch.dtype | None) -> Step:
    """A step on fp32 copies of the weights, which go back to the bf16 model; `round_to` also rounds the copies."""
    masters = [p.clone().requires_grad_() for p in data.start.values()]
    optimizer = make(masters)

    def step(lr: float) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for master, p in zip(masters, data.params.values(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, data.params.values(), strict=True):
                p.copy_(master)
                if round_to is not None:
                    master.copy_(p)

    return step


def ours(data: Finetune, seed: int, state_bits: int, master_bits: int, weights: str = "model", **compute: str) -> Step:
    if compute:
        quantize(data.model, **compute)
        number_steps(data.model, seed, 0)
    streamer = None
    if weights != "model":
        config = LowMemConfig(offload="none", weights=weights, master_bits=master_bits)
        streamer = attach(data.model, config, data.device)
        master_bits = 24 if master_bits == 8 else master_bits  # of norms and embeddings
    bits = param_bits(data.model, state_bits)
    optimizer = LowBitAdamW(
        data.params.values(),
        lr=0.0,
        weight_decay=0.0,
        state_bits=state_bits,
        master_bits=master_bits,
        param_bits=bits,
        seed=seed,
    )
    if streamer is not None:
        optimizer.use_codes(streamer.codes())
    numbers = itertools.count(1)

    def step(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        number_steps(data.model, seed, next(numbers))

    return step


def qlora(data: Finetune, seed: int, rank: int = 16, faster: float = 10.0) -> Step:
    """Adapters on all linear layers of blocks, whose weights are what bitsandbytes' nf4 says of them, and frozen.

    Adapters learn at `faster` times the rate, as is usual. bitsandbytes' own layers multiply with the same weights.
    """
    import bitsandbytes
    from peft import LoraConfig, get_peft_model

    weights = layer_weights(data.model)
    for p in weights:
        packed, state = bitsandbytes.functional.quantize_4bit(p.data.contiguous(), quant_type="nf4", blocksize=64)
        p.data.copy_(bitsandbytes.functional.dequantize_4bit(packed, state))
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    data.adapted = get_peft_model(data.model, config, autocast_adapter_dtype=False)
    adapters = [p for p in data.model.parameters() if p.requires_grad]
    optimizer = LowBitAdamW(adapters, lr=0.0, weight_decay=0.0, seed=seed)

    def step(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = faster * lr
        optimizer.step()

    return step


def recipes(data: Finetune) -> dict[str, Callable[[int], Step]]:
    def adamw(params: list) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.0, weight_decay=0.0)

    found = {
        "fp32 states, fp32 weights (torch AdamW)": lambda seed: over_masters(data, adamw, None),
        "4-bit, 24-bit master (default)": lambda seed: ours(data, seed, 4, 24),
        "int8 products, 4-bit, 24-bit master": lambda seed: ours(data, seed, 4, 24, grad_weight="int8"),
        "int8 products but for weight gradients": lambda seed: ours(data, seed, 4, 24, grad_weight="model"),
        "int8 weights, 24-bit master": lambda seed: ours(data, seed, 4, 24, "int8"),
        "int8 weights alone": lambda seed: ours(data, seed, 4, 8, "int8"),
        "int8 weights, int8 products": lambda seed: ours(data, seed, 4, 24, "int8", grad_weight="int8"),
        "int4 weights, 24-bit master": lambda seed: ours(data, seed, 4, 24, "int4"),
        "8-bit, 24-bit master": lambda seed: ours(data, seed, 8, 24),
        "4-bit, 16-bit weights, stochastic": lambda seed: ours(data, seed, 4, 16),
        "32-bit, 16-bit weights, stochastic": lambda seed: ours(data, seed, 32, 16),
        "fp32 states, bf16 weights to nearest": lambda seed: over_masters(data, adamw, torch.bfloat16),
    }
    if find_spec("bitsandbytes") and find_spec("peft"):
        found["QLoRA: rank 16 on nf4, ten times the rate"] = lambda seed: qlora(data, seed)
    if find_spec("torchao"):
        from torchao.optim import AdamW4bit

        found["torchao AdamW4bit, fp32 weights"] = lambda seed: over_masters(
            data, lambda params: AdamW4bit(params, lr=1e-4, weight_decay=0.0), None
        )
    return found


SMALL_LR = ("fp32 states", "4-bit, 24")  # the recipes that matter there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 1e-6])
    parser.add_argument("--recipes", nargs="+", default=[""], help="beginnings of the names of those to run (all)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for each learning rate")
    parser.add_argument("--losses", type=Path, help="JSON of losses found before; extended")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = Finetune(args.model, args.device)
    before = data.evaluate()
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    text = (
        f"Model: {data.origin}; {sum(p.numel() for p in data.params.values()) / 1e6:.1f} M parameters. Text: help "
        f"texts and standard library of Python {platform.python_version()}, {data.train.numel()} tokens to train on, "
        f"{data.heldout.numel()} held out. {args.steps} steps of {16 * 512} tokens. {name}, torch {torch.__version__}, "
        f"kernel {native.isa()}.\n"
    )
    for lr in args.lr:
        chosen = recipes(data)
        if lr < 1e-5:
            chosen = {k: v for k, v in chosen.items() if k.startswith(SMALL_LR)}
        chosen = {k: v for k, v in chosen.items() if k.startswith(tuple(args.recipes))}
        text += f"\n### Learning rate {lr:g}\n\n"
        text += table(compare(data, chosen, lr, args.steps, args.seeds, args.budget, args.losses), before)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
