"""The doors of transformers and Accelerate: ``LowMemTrainer``, ``LowMemMixin`` and ``create_optimizer``.

The mixin goes in front of any Trainer (``class MySFT(LowMemMixin, SFTTrainer)``) and changes three things: which
optimizer is made; that clipping never touches the gradients (the exact global norm is taken, and the factor rides into
the optimizer); and that what cannot work is refused before ``train()`` changes anything. ``prepare_training`` does the
last for the stock Trainer too, see ``registration.py``.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
import zipfile
from collections.abc import Mapping, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, Trainer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import TrainingArguments

from .attachment import attach, streamer_of
from .config import DEFAULT_OPTIM, OPTIM_BITS, LowMemConfig, merge
from .loss import use_chunked_loss
from .optim import LowBitAdamW, param_bits
from .stream import Streamer

if TYPE_CHECKING:
    from transformers.trainer import Trainer as _TrainerBase
else:
    _TrainerBase = object  # the mixin's own next class is whatever Trainer it is put in front of


# -- making the optimizer ---------------------------------------------------------------------------------------
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
        config = merge(None, _our_name(args_or_config), args_or_config.optim_args)
        adam = {**_adam_settings(args_or_config), "weight_decay": args_or_config.weight_decay}
    else:
        raise TypeError(
            f"create_optimizer takes TrainingArguments or a LowMemConfig, not {type(args_or_config).__name__}"
        )
    check_model(model)
    _check_offload(config, model)
    adam.update(overrides)
    decay = adam.pop("weight_decay")
    args = args_or_config if isinstance(args_or_config, TrainingArguments) else None
    return LowBitAdamW(_decay_groups(model, decay), **adam, **_state_settings(config, model, args))


def stock_optimizer(args: TrainingArguments, model: nn.Module | None) -> tuple[type[LowBitAdamW], dict[str, Any]]:
    """What the stock Trainer's ``get_optimizer_cls_and_kwargs`` returns for one of our names.

    Without a model no parameter gets a width of its own: only tensors under 4,096 values keep 32 bits.
    """
    config = LowMemConfig.from_optim_args(args.optim, args.optim_args)
    _check_offload(config, model)
    return LowBitAdamW, {**_adam_settings(args), **_state_settings(config, model, args)}


def _check_offload(config: LowMemConfig, model: nn.Module | None) -> None:
    """Raises: ValueError where blocks are to be streamed and nobody has seen to it."""
    if config.offload_share and (model is None or streamer_of(model) is None):
        raise ValueError(
            f'offload="{config.offload}" streams a model\'s blocks, which the stock Trainer and the optimizer alone do '
            "not do: use LowMemTrainer (or class MyTrainer(LowMemMixin, ...)), or call attach(model, config) before "
            "the model is moved to the GPU"
        )


def _adam_settings(args: TrainingArguments) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _state_settings(
    config: LowMemConfig, model: nn.Module | None, args: TrainingArguments | None = None
) -> dict[str, Any]:
    seed = config.seed if config.seed is not None else args.seed if args is not None else 0
    return {
        "state_bits": config.state_bits,
        "master_bits": config.master_bits,
        "param_bits": None if model is None else param_bits(model, config.state_bits),
        "threads": config.threads,
        "seed": seed,
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


def _our_name(args: TrainingArguments) -> str | None:
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


# -- what is refused before the training ------------------------------------------------------------------------
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
    if isinstance(trainer, LowMemMixin):
        return trainer.lowmem.state_bits, trainer.lowmem.master_bits
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
    saved_master = groups[0].get("master_bits", 0)
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
        logs, optimizer = kwargs.get("logs"), _unwrapped(kwargs.get("optimizer"))
        if logs is None or not logs.keys() & {"loss", "train_loss"}:
            return
        for name in ("skipped_steps", "skipped_blocks"):
            count = getattr(optimizer, name, 0)
            if count:
                logs[name] = count
                if state.log_history:
                    state.log_history[-1][name] = count  # stock code has made its copy before it calls us


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


# -- the Trainer ------------------------------------------------------------------------------------------------
class LowMemMixin(_TrainerBase):
    """Any Trainer of transformers or TRL, with ``LowBitAdamW``.

    ``class MySFT(LowMemMixin, SFTTrainer): ...`` is all that it takes.

    Args:
        lowmem: a ``LowMemConfig`` or a dict of its fields, merged with ``args.optim`` and ``args.optim_args``. Without
            it those alone count; where ``args.optim`` is left at its default the states have 4 bits.

    Attributes:
        lowmem: the merged ``LowMemConfig``.

    Raises:
        ValueError: the settings contradict each other, or ask for another optimizer.
    """

    lowmem: LowMemConfig

    def __init__(self, *args: Any, lowmem: LowMemConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        # Before the Trainer is made: that may move a model to a GPU and tokenize a data set.
        training_args = next((x for x in (*args, *kwargs.values()) if isinstance(x, TrainingArguments)), None)
        if training_args is None:
            self.lowmem = merge(lowmem, None, None)
        else:
            self.lowmem = merge(lowmem, _our_name(training_args), training_args.optim_args)
            if self.lowmem.offload_share and training_args.torch_compile:
                raise ValueError(
                    f'offload="{self.lowmem.offload}" moves weights under a compiled model, which torch.compile cannot '
                    'follow: write torch_compile=False, or offload="none"'
                )
        super().__init__(*args, **kwargs)
        given = self.optimizer_cls_and_kwargs[0] if self.optimizer_cls_and_kwargs else type(self.optimizer)
        if self.optimizer_cls_and_kwargs or not isinstance(self.optimizer, LowBitAdamW | None):
            raise ValueError(
                f"{type(self).__name__} makes its own optimizer, LowBitAdamW, and was handed {given.__name__}: leave "
                "optimizers and optimizer_cls_and_kwargs out, or train with transformers.Trainer"
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.train``. Raises: as ``prepare_training``, before anything has changed."""
        prepare_training(self, resume_from_checkpoint)
        if self.model_init is None:
            self._attach(self.model, self.args.device)
        callbacks = self.callback_handler.callbacks
        if self._streams() and not any(isinstance(callback, SettleCallback) for callback in callbacks):
            callbacks.insert(0, SettleCallback(self))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException:
            streamer = None if self.model is None else streamer_of(self.model)
            if streamer is not None:
                streamer.go_home()  # in the middle of a step, or by Ctrl-C: the weights are at home all the same
            raise

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See ``Trainer.training_step``. Without clipping, streamed blocks are updated during the last backward."""
        streamer = None if self.model is None else streamer_of(self.model)
        if streamer is not None:
            unclipped = not self.args.max_grad_norm and self.accelerator.scaler is None
            streamer.early = unclipped and self.accelerator.sync_gradients and not self._gradients_are_others()
        return super().training_step(*args, **kwargs)

    def _steps_are_others(self) -> bool:
        return any(_is_others(type(self), name) for name in ("training_step", "compute_loss"))

    def _gradients_are_others(self) -> bool:
        """Whether somebody's own code may run several backwards a step, or change gradients after them."""
        looks = (_may_look(callback, "on_pre_optimizer_step") for callback in self.callback_handler.callbacks)
        return self._steps_are_others() or any(looks)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        self._attach(model, device)
        super()._move_model_to_device(model, device)

    def create_accelerator_and_postprocess(self) -> None:
        """See ``Trainer``. A model that is only evaluated, TRL's reference say, is streamed like the trained one."""
        super().create_accelerator_and_postprocess()
        if not self._streams():
            return
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> Any:
            if evaluation_mode:
                self._attach(model, self.args.device)
            return prepare(model, *args, evaluation_mode=evaluation_mode, **kwargs)

        self.accelerator.prepare_model = prepare_model

    def _attach(self, model: nn.Module, device: torch.device) -> None:
        if self.lowmem.offload_share and streamer_of(model) is None:
            attach(model, self.lowmem, device)
        if streamer_of(model) is not None:  # also by load, or by the user
            use_chunked_loss(model)

    def _streams(self) -> bool:
        model = getattr(self, "model", None)
        return self.lowmem.offload_share > 0 or (model is not None and streamer_of(model) is not None)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = super()._build_accelerator_args(**kwargs)
        if self._streams():
            # Autocast keeps a copy of every weight that it has cast until the forward ends: of all streamed blocks.
            args["kwargs_handlers"] = [*args.get("kwargs_handlers", []), AutocastKwargs(cache_enabled=False)]
        return args

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """See ``Trainer.create_optimizer``, which makes the parameter groups."""
        if self.optimizer is None:
            target: Any = self.model if model is None else model
            check_model(target)
            kwargs = {**_adam_settings(self.args), **_state_settings(self.lowmem, target, self.args)}
            self.optimizer_cls_and_kwargs = (LowBitAdamW, kwargs)
        optimizer = super().create_optimizer(model)
        target = self.model if model is None else model
        streamer = None if target is None else streamer_of(target)
        if streamer is not None:
            overlap(streamer, optimizer)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._measure_gradients(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self._measure_gradients(model, float("inf")) if grad_norm is None else grad_norm

    def _measure_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """The global norm of the gradients; what is to be done with them rides into the next step.

        The factor is that of torch.nn.utils.clip_grads_with_norm_, in the norm's own precision.
        """
        self.accelerator.unscale_gradients()
        params = list(model.parameters())
        grads = [p.grad for p in params if p.grad is not None]
        norm = total_norm(params, streamer_of(model))
        finite = bool(norm.isfinite())
        if not finite and all(bool(g.isfinite().all()) for g in grads):  # the gradients' own dtype was too narrow
            norm = torch.stack([g.double().norm().to(norm.device) for g in grads]).norm()
            finite = True
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item() if finite else 1.0
        _unwrapped(self.optimizer).scale_gradients(factor, finite)
        return norm


def total_norm(params: Sequence[nn.Parameter], streamer: Streamer | None) -> Tensor:
    """torch.nn.utils.get_total_norm of the parameters' gradients, with what the streamer has measured on their way."""
    norms: dict[nn.Parameter, Tensor] = {} if streamer is None else dict(streamer.early_norms)
    grads = {p: p.grad for p in params if p.grad is not None and p not in norms}
    if streamer is not None:
        for p in grads:
            norm = streamer.gradient_norm(p)
            if norm is not None:
                norms[p] = norm
    if not norms:
        return torch.nn.utils.get_total_norm(list(grads.values()))
    first = next(iter(norms.values())).device
    for device in {grad.device for p, grad in grads.items() if p not in norms}:
        here = [p for p, grad in grads.items() if p not in norms and grad.device == device]
        norms.update(zip(here, torch._foreach_norm([grads[p] for p in here]), strict=True))
    measured = [p for p in params if p in norms]
    dtypes = list(dict.fromkeys(p.dtype for p in measured))
    in_order = sorted(measured, key=lambda p: dtypes.index(p.dtype))  # that in which torch adds them up, dtype by dtype
    return torch.linalg.vector_norm(torch.stack([norms[p].to(first) for p in in_order]))


def overlap(streamer: Streamer, optimizer: Any) -> None:
    """Lets the optimizer update streamed blocks under the next forward, one after another."""
    optimizer = _unwrapped(optimizer)
    optimizer.defer([p for _, p in block.params] for block in streamer.blocks)
    streamer.updates = optimizer


_OURS = ("transformers.", "hf_lowmem.", "trl.", "accelerate.")  # whose methods look at no weights where others might


def _is_others(cls: type, name: str) -> bool:
    """Whether a method is somebody's own, and no library's."""
    return not next(c for c in cls.__mro__ if name in vars(c)).__module__.startswith(_OURS)


class SettleCallback(TrainerCallback):
    """Waits for updates that are under way before others' callbacks look at the weights."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.proxy(trainer)

    def _settle(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer.optimizer is not None:
            _unwrapped(self._trainer.optimizer).synchronize()

    def _settle_if_others_look(self, event: str, *args: Any, **kwargs: Any) -> None:
        looks = any(_may_look(callback, event) for callback in self._trainer.callback_handler.callbacks)
        if event == "on_step_begin":  # the forward is next: code before it may read weights
            looks = looks or self._trainer._steps_are_others()
        if looks:
            self._settle()


def _may_look(callback: TrainerCallback, event: str) -> bool:
    of_trl = type(callback).__module__.startswith("trl.")  # SyncRefModelCallback reads weights
    defined = getattr(type(callback), event, None) is not getattr(TrainerCallback, event)
    return defined and (of_trl or _is_others(type(callback), event))


for _event in (name for name in dir(TrainerCallback) if name.startswith("on_")):
    always = _event in ("on_epoch_end", "on_evaluate", "on_predict", "on_save", "on_train_end")
    method = SettleCallback._settle if always else partialmethod(SettleCallback._settle_if_others_look, _event)
    setattr(SettleCallback, _event, method)


class LowMemTrainer(LowMemMixin, Trainer):
    """``transformers.Trainer`` with ``LowBitAdamW``; ``LowMemMixin`` has the one argument more."""
