"""What is refused before a training begins, and the log of what was skipped in it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, Trainer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from .config import LowMemConfig
from .layer import gradient_dtype
from .overlap import unwrapped
from .sums import sums_of


def check_model(model: nn.Module) -> None:
    """Raises: ValueError if no parameter is trainable, or if an embedding has sparse gradients."""
    name = type(model).__name__
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise ValueError(
            f"{name} has no trainable parameter: all {count} of its parameters have requires_grad=False. Set it to "
            "True on those to be trained, or add an adapter"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{name}.{path} is an {type(module).__name__} with sparse=True: its sparse gradients have no place in "
                f"low-bit states. Set {path}.sparse = False, or freeze its weight"
            )


def check_gradients(model: Any, config: LowMemConfig, stays: bool) -> None:
    """Raises: ValueError where gradients that are wanted in fp32 are not, or cannot be.

    Args:
        model: about to be trained.
        stays: whether parameters on a GPU are updated there.
    """
    wanted = config.gradient_dtype
    if wanted not in ("fp32", "auto") or (wanted == "auto" and sums_of(model) is not None):
        return
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.dtype is not torch.float32]
    for name, p in trained:
        if gradient_dtype(p) is not torch.float32:
            raise ValueError(
                f'gradient_dtype="fp32" came after {name} had been attached with gradients in {p.dtype}: give it to '
                "attach or load too, or call detach(model) first"
            )
        if p.device.type == "cuda" and not stays:
            raise ValueError(
                f'gradient_dtype="{wanted}" is for parameters that are updated where they are, and {name}, on '
                f'{p.device}, is updated in RAM: write offload="auto" or "0" (which need Triton), or leave '
                "gradient_dtype out"
            )


def prepare_training(trainer: Trainer, resume_from_checkpoint: str | bool | None) -> None:
    """What a Trainer with our optimizer does before ``train()``: refuses what cannot work, and sees to the log.

    Raises:
        ValueError: the model is refused (``check_model``), another backend owns the optimizer, or the checkpoint holds
            states of more bits than this run's.
        FileNotFoundError: the checkpoint to resume from lacks its optimizer or scheduler.
        RuntimeError: one of these files cannot be read.
    """
    _check_backend(trainer)
    if trainer.model_init is None:
        check_model(trainer.model)
    folder = resume_from_checkpoint
    if folder is True:
        folder = get_last_checkpoint(trainer.args.output_dir)
    if folder and os.path.isdir(folder):  # stock code refuses a folder that is not there
        _check_checkpoint(trainer, str(folder))
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, SkippedStepsCallback) for callback in callbacks):
        callbacks.insert(0, SkippedStepsCallback())  # before those that report what was logged


def _check_backend(trainer: Trainer) -> None:
    for enabled, name in ((trainer.is_deepspeed_enabled, "DeepSpeed"), (trainer.is_fsdp_enabled, "FSDP")):
        if enabled:
            raise ValueError(
                f"{name} is on and brings its own sharded optimizer in the place of LowBitAdamW. Turn {name} off, or "
                "choose another optim"
            )


def _check_checkpoint(trainer: Trainer, folder: str) -> None:
    """Stock code goes on with a fresh optimizer where one of the two files is missing, and says nothing."""
    fresh = (
        f"To start a fresh optimizer from its weights, load the model with from_pretrained({folder!r}) and call "
        "train() without resume_from_checkpoint"
    )
    saved: dict[str, Any] = {}
    for file in (OPTIMIZER_NAME, SCHEDULER_NAME):
        path = os.path.join(folder, file)
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"{folder} has no {file}, so its training cannot be resumed (was it saved with save_only_model=True?). "
                + fresh
            )
        try:
            saved[file] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums of what it maps
                damaged = archive.testzip()
            if damaged:
                raise ValueError(f"the checksum of {damaged} is wrong")
        except Exception as error:
            raise RuntimeError(
                f"{path} ({os.path.getsize(path):,} bytes) cannot be read: {error}. It is truncated or damaged: resume "
                f"from an older checkpoint. {fresh}"
            ) from error
    _check_widths(saved[OPTIMIZER_NAME], os.path.join(folder, OPTIMIZER_NAME), *_wanted_widths(trainer), fresh)


def _wanted_widths(trainer: Trainer) -> tuple[int, int]:
    if trainer.optimizer is not None:
        group = trainer.optimizer.param_groups[0]
        return group["state_bits"], group["master_bits"]
    lowmem = getattr(trainer, "lowmem", None)
    if isinstance(lowmem, LowMemConfig):
        return lowmem.state_bits, lowmem.master_bits
    if trainer.optimizer_cls_and_kwargs is not None:
        kwargs = trainer.optimizer_cls_and_kwargs[1]
        return kwargs.get("state_bits", 4), kwargs.get("master_bits", 24)
    config = LowMemConfig.from_optim_args(trainer.args.optim, trainer.args.optim_args)
    return config.state_bits, config.master_bits


def _check_widths(saved: Mapping[str, Any], path: str, state_bits: int, master_bits: int, fresh: str) -> None:
    """Refuses early what ``load_state_dict`` would refuse after the model's weights have been replaced."""
    groups = saved.get("param_groups") or [{}]
    adamw = any("exp_avg" in state for state in saved.get("state", {}).values())
    saved_bits = groups[0].get("state_bits", 32 if adamw else 0)
    if saved_bits > state_bits:
        raise ValueError(
            f"{path} holds {saved_bits}-bit states, and this run has {state_bits}-bit ones: narrowing them would lose "
            f'what the run has learnt. Write optim="cpu_adam{saved_bits}bit". {fresh}'
        )
    bare = any("codes" in state for state in saved.get("state", {}).values())
    saved_master = 8 if bare and master_bits == 8 else groups[0].get("master_bits", 0)
    if saved_master > master_bits:
        raise ValueError(
            f"{path} was written with master_bits={saved_master}, and this run has {master_bits}: narrowing the master "
            f'weights would lose what the run has learnt. Write optim_args="master_bits={saved_master}". {fresh}'
        )


class SkippedStepsCallback(TrainerCallback):
    """Adds ``skipped_steps`` to what is logged, once a step has been skipped for a NaN or infinite gradient.

    And ``skipped_blocks``, once a step has left out blocks: gradients changed after they were looked at, or too large.
    """

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs, optimizer = kwargs.get("logs"), unwrapped(kwargs.get("optimizer"))
        if logs is None or not logs.keys() & {"loss", "train_loss"}:
            return
        for name in ("skipped_steps", "skipped_blocks"):
            count = getattr(optimizer, name, 0)
            if count:
                logs[name] = count
                if state.log_history:
                    state.log_history[-1][name] = count  # stock code has made its copy before it calls us
