"""What makes a ``LowBitAdamW``: of a model and settings, as the doors of transformers and Accelerate have them."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

from .attachment import device_or_default, gradients_are_as_wanted, share_of, streamer_of
from .checks import check_model
from .config import DEFAULT_OPTIM, OPTIM_BITS, LowMemConfig, merge
from .lowbit import rounding_of
from .optim import LowBitAdamW, param_bits


def create_optimizer(
    model: nn.Module, args_or_config: TrainingArguments | LowMemConfig, **overrides: Any
) -> LowBitAdamW:
    """The optimizer that ``LowMemTrainer`` would make, for a training loop of one's own (Accelerate's, say).

    Norms and biases get no weight decay, as with the stock Trainer. A step with a NaN or infinite gradient is skipped
    and counted in ``skipped_steps``.

    Args:
        model: the model to train; its parameters with ``requires_grad``.
        args_or_config: ``TrainingArguments`` (learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay, optim
            and optim_args are read; where optim is left at its default the states have 4 bits), or a ``LowMemConfig``.
        overrides: ``lr``, ``betas``, ``eps``, ``weight_decay``. With a ``LowMemConfig`` the defaults are
            torch.optim.AdamW's.

    Raises:
        TypeError: another override, or neither of the two kinds of settings.
        ValueError: a setting is refused, nothing is trainable, an embedding has sparse gradients, or ``offload`` is set
            and the model is not attached.
    """
    unknown = overrides.keys() - {"lr", "betas", "eps", "weight_decay"}
    if unknown:
        raise TypeError(
            f"create_optimizer has no argument {', '.join(sorted(unknown))}: it takes lr, betas, eps and weight_decay; "
            "the rest are fields of LowMemConfig"
        )
    if isinstance(args_or_config, LowMemConfig):
        config = args_or_config
        adam: dict[str, Any] = {"weight_decay": 0.01}
    elif isinstance(args_or_config, TrainingArguments):
        config = merge(None, our_name(args_or_config), args_or_config.optim_args)
        adam = {**adam_settings(args_or_config), "weight_decay": args_or_config.weight_decay}
    else:
        raise TypeError(
            f"create_optimizer takes TrainingArguments or a LowMemConfig, not {type(args_or_config).__name__}"
        )
    check_model(model)
    _check_offload(config, model)
    adam.update(overrides)
    decay = adam.pop("weight_decay")
    args = args_or_config if isinstance(args_or_config, TrainingArguments) else None
    return LowBitAdamW(_decay_groups(model, decay), **adam, **state_settings(config, model, args))


def stock_optimizer(args: TrainingArguments, model: nn.Module | None) -> tuple[type[LowBitAdamW], dict[str, Any]]:
    """What the stock Trainer's ``get_optimizer_cls_and_kwargs`` returns for one of our names.

    Without a model no parameter gets a width of its own: only tensors under 4,096 values keep 32 bits.
    """
    config = LowMemConfig.from_optim_args(args.optim, args.optim_args)
    _check_offload(config, model)
    return LowBitAdamW, {**adam_settings(args), **state_settings(config, model, args)}


def _check_offload(config: LowMemConfig, model: nn.Module | None) -> None:
    """Raises: ValueError where blocks are to be streamed and nobody has seen to it."""
    streams = share_of(config, device_or_default(None)) > 0 or config.weights != "model"
    if streams and (model is None or streamer_of(model) is None):
        raise ValueError(
            f"{config.resting} streams a model's blocks, or has the device see few bits of them, which the stock "
            "Trainer and the optimizer alone do not do: use LowMemTrainer (or class MyTrainer(LowMemMixin, ...)), or "
            "call attach(model, config) before the model is moved to the GPU"
        )
    ours = {
        "compute": config.compute in ("int8", "int4") and (model is None or rounding_of(model) is None),
        "micro_batch_size": config.micro_batch_size is not None,
        "offload_activations": bool(config.offload_activations),
        "nvme_path": bool(config.nvme_path),
        "gradient_dtype": config.gradient_dtype != "model"
        and (model is None or (streamer_of(model) is None and not gradients_are_as_wanted(model, config))),
    }
    wanted = ", ".join(name for name, is_set in ours.items() if is_set)
    if wanted:
        raise ValueError(
            f"{wanted} changes what happens in a training step, which the stock Trainer and the optimizer alone do not "
            "do: use LowMemTrainer (or class MyTrainer(LowMemMixin, ...)), or leave it out"
        )


def adam_settings(args: TrainingArguments) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def seed_of(config: LowMemConfig, args: TrainingArguments | None) -> int:
    """Of all random rounding."""
    return config.seed if config.seed is not None else args.seed if args is not None else 0


def state_settings(
    config: LowMemConfig, model: nn.Module | None, args: TrainingArguments | None = None
) -> dict[str, Any]:
    return {
        "state_bits": config.state_bits,
        "master_bits": 24 if config.master_bits == 8 else config.master_bits,  # of what does not rest in 8 bits
        "param_bits": None if model is None else param_bits(model, config.state_bits),
        "threads": config.threads,
        "seed": seed_of(config, args),
        "staging_bytes": config.staging_bytes,
        "check_finite": True,
        "max_skipped_steps": config.max_skipped_steps,
    }


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The two parameter groups of the stock Trainer: its rule is asked, not copied."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # uses nothing of self
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]


def our_name(args: TrainingArguments) -> str | None:
    """The optim name if it is one of ours, None if it was left at its default."""
    name = str(getattr(args.optim, "value", args.optim))
    if name in OPTIM_BITS:
        return name
    default = next(f.default for f in dataclasses.fields(args) if f.name == "optim")
    if args.optim == default:
        return None
    raise ValueError(
        f'optim="{name}" is another optimizer than the one that LowMemTrainer and create_optimizer make: write '
        f'optim="{DEFAULT_OPTIM}" or leave optim out, or train with transformers.Trainer'
    )
