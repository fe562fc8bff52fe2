"""The doors of transformers: ``LowMemTrainer`` and ``LowMemMixin``.

The mixin goes in front of any Trainer (``class MySFT(LowMemMixin, SFTTrainer)``) and changes three things: which
optimizer is made; that clipping never touches the gradients (the exact global norm is taken, and the factor rides into
the optimizer); and that what cannot work is refused before ``train()`` changes anything. ``prepare_training`` does the
last for the stock Trainer too, see ``registration.py``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.serialization import config as serialization
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

from .activations import InputOffload
from .again import Again, fresh, largest
from .attachment import attach, check_attached, find_blocks, share_of, streamer_of, widen_gradients
from .checkpointing import any_checkpointed
from .checks import check_gradients, check_model, prepare_training
from .config import LowMemConfig, merge
from .factory import adam_settings, our_name, seed_of, state_settings
from .folders import check_folder
from .loss import use_chunked_loss
from .lowbit import caveats, chosen_compute, number_steps, roundings_of, use_compute
from .memory import ram_bytes
from .optim import LowBitAdamW
from .overlap import (
    NormAhead,
    SettleCallback,
    is_others,
    keep_on_device,
    looked_at,
    may_look,
    overlap,
    rest_on_drives,
    total_norm,
    unwrapped,
)
from .placement import Placement, check_budgets, memory_of
from .plan import Footprint, footprint, readable
from .split import BatchSplit, check_splittable
from .stream import Streamer
from .sums import add_stochastically, sums_of

if TYPE_CHECKING:
    from transformers.trainer import Trainer as _TrainerBase
else:
    _TrainerBase = object  # the mixin's own next class is whatever Trainer it is put in front of


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
    _placement: Placement | None = None
    _inputs: InputOffload | None = None
    _split: BatchSplit | None = None
    _norm_ahead: NormAhead | None = None
    _filters_loss = False  # for a moment, in the place of args.logging_nan_inf_filter
    _step_hooks: Sequence[RemovableHandle] = ()

    def __init__(self, *args: Any, lowmem: LowMemConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        # Before the Trainer is made: that may move a model to a GPU and tokenize a data set.
        training_args = next((x for x in (*args, *kwargs.values()) if isinstance(x, TrainingArguments)), None)
        if training_args is None:
            self.lowmem = merge(lowmem, None, None)
        else:
            self.lowmem = merge(lowmem, our_name(training_args), training_args.optim_args)
            if self.lowmem.gradient_dtype == "auto" and training_args.gradient_accumulation_steps == 1:
                self.lowmem = self.lowmem.replaced(gradient_dtype="model")  # there is nothing to be added
            if (self.lowmem.offload_share or self.lowmem.weights != "model") and training_args.torch_compile:
                raise ValueError(
                    f"{self.lowmem.resting} moves weights under a compiled model, which torch.compile cannot follow: "
                    'write torch_compile=False, or offload="none" without weights='
                )
        for folder in self.lowmem.nvme_path or ():
            check_folder(folder)
            if not self.lowmem.offload_share:
                raise ValueError(
                    f'nvme_path={folder!r} is for what is streamed, and offload="{self.lowmem.offload}" streams '
                    'nothing: write offload="auto" or offload="cpu" too'
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
        for caveat in caveats(self.lowmem):
            print(f"hf_lowmem: {caveat}")
        if self.model_init is None:
            self._attach(self.model, self.args.device)
        for rounding in roundings_of(self.model) if self.model is not None else ():
            rounding.go_back({})
        callbacks = self.callback_handler.callbacks
        if self._streams() and not any(isinstance(callback, SettleCallback) for callback in callbacks):
            callbacks.insert(0, SettleCallback(self))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._stock_filter_again()
            streamer = None if self.model is None else streamer_of(self.model)
            if streamer is not None:
                streamer.go_home()  # also in the middle of a step, or by Ctrl-C
            if self._split is not None:
                self._split.remove()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See ``Trainer.training_step``. Without clipping, streamed blocks are updated during the last backward.

        Where the GPU runs out of memory, blocks that were kept there move to RAM, and the micro-batch is done again if
        it is the step's first.
        """
        self._stock_filter_again()
        streamer = None if self.model is None else streamer_of(self.model)
        if self.model is not None and (sums := sums_of(self.model)) is not None:
            sums.seed, sums.step = seed_of(self.lowmem, self.args), self.state.global_step
        if self.model is not None:
            number_steps(self.model, seed_of(self.lowmem, self.args), self.state.global_step)
        if streamer is not None:
            streamer.early = self._unclipped() and self.accelerator.sync_gradients
            streamer.early_norms.clear()
        if self.lowmem.offload_activations or self._inputs is not None:
            self._offload_inputs()
        self._split_batches()
        if self._placement is None:
            loss = super().training_step(*args, **kwargs)
        else:
            self._placement.before_forward(largest(args, kwargs))
            loss = self._step_with_room(Again.of(self.model), args, kwargs)
        mine = self.accelerator.scaler is None and not self._steps_are_others()  # nobody changes gradients after this
        if mine and self.accelerator.sync_gradients and self.model is not None:
            self._norm_ahead = NormAhead(list(self.model.parameters()), streamer)
        others = self._steps_are_others() or is_others(type(self), "floating_point_ops")
        return self._filtered(loss) if self.is_in_train and not others else loss

    def _filtered(self, loss: Tensor) -> Tensor:
        """Does on the device what the Trainer is about to do with ``logging_nan_inf_filter``: a loss that is not finite
        is logged as the mean of those before it.

        Stock code asks the device whether it is, and waits for the whole backward before the CPU goes on.
        """
        if not self.args.logging_nan_inf_filter or loss.device != self._tr_loss.device:
            return loss
        self._filters_loss, self.args.logging_nan_inf_filter = True, False
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean)

    def _stock_filter_again(self) -> None:
        if self._filters_loss:
            self._filters_loss, self.args.logging_nan_inf_filter = False, True

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """See ``Trainer``, which calls it when it has added up the loss of a micro-batch."""
        self._stock_filter_again()
        return super().floating_point_ops(inputs)

    def _step_with_room(self, again: Again | None, args: Any, kwargs: Any) -> Tensor:
        roundings = [] if self.model is None else roundings_of(self.model)
        backwards = [(rounding, rounding.backwards()) for rounding in roundings]
        while True:
            try:
                return super().training_step(*fresh(args), **fresh(kwargs))
            except torch.OutOfMemoryError as error:
                failed = error.with_traceback(None)  # which would keep the activations
            self._make_room(failed, again)
            for rounding, before in backwards:
                rounding.go_back(before)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer``. Where the GPU runs out of memory, blocks that were kept there move to RAM."""
        while True:
            try:
                return super().prediction_step(*fresh(args), **fresh(kwargs))
            except torch.OutOfMemoryError as error:
                failed = error.with_traceback(None)
            streamer = None if self.model is None else streamer_of(self.model)
            if streamer is not None:
                streamer.go_home()
            if self._placement is None or not self._placement.make_room():
                raise failed

    def _make_room(self, failed: BaseException, again: Again | None) -> None:
        """After a forward or backward without enough memory. Raises: what failed, if there is nothing to be done."""
        assert self._placement is not None
        streamer = self._placement.streamer
        if again is None or (streamer.early and streamer.early_norms):
            raise failed  # some gradients have been added to already, or weights changed
        streamer.go_home()
        again.restore()
        if self._placement.make_room():
            return
        self._placement.memory.tidy()
        if self.lowmem.offload_activations is not None or self._inputs is not None or not self._offload_inputs():
            raise failed
        self._placement.start_again()
        self._placement.report("hf_lowmem: no room for all activations on the GPU: offload_activations=true")
        self._placement.before_forward(0)

    def _offload_inputs(self) -> int:
        """Has the inputs of checkpointed blocks wait in RAM. Returns: of how many blocks."""
        assert self.model is not None
        if self._inputs is None:
            modules = [module for _, module in find_blocks(self.model)]
            self._inputs = InputOffload(modules, self.args.device)
        count = self._inputs.install()
        if self.lowmem.offload_activations and not count:
            raise ValueError(
                "offload_activations=true moves what gradient checkpointing keeps, and no block of "
                f"{type(self.model).__name__} is checkpointed: write gradient_checkpointing=True"
            )
        return count

    def _split_batches(self) -> None:
        """Has checkpointed blocks compute batches in parts, if that is wanted."""
        rows = self.lowmem.micro_batch_size
        if rows is None or self.model is None:
            return
        if self._split is None:
            check_splittable(self.model)
            streamer = streamer_of(self.model)
            modules = [module for _, module in find_blocks(self.model)]
            self._split = BatchSplit(modules, rows, None if streamer is None else streamer.whole)
        if not self._split.install():
            raise ValueError(
                f"micro_batch_size={rows} has checkpointed blocks compute a batch in parts, and no block of "
                f"{type(self.model).__name__} is checkpointed: write gradient_checkpointing=True"
            )

    def _unclipped(self) -> bool:
        """Whether streamed blocks may be updated during backward."""
        return not self.args.max_grad_norm and self.accelerator.scaler is None and not self._gradients_are_others()

    def _steps_are_others(self) -> bool:
        return any(is_others(type(self), name) for name in ("training_step", "compute_loss"))

    def _gradients_are_others(self) -> bool:
        """Whether somebody's own code may run several backwards a step, or change gradients after them."""
        looks = (may_look(callback, "on_pre_optimizer_step") for callback in self.callback_handler.callbacks)
        return self._steps_are_others() or any(looks)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        self._attach(model, device)
        super()._move_model_to_device(model, device)

    def create_accelerator_and_postprocess(self) -> None:
        """See ``Trainer``. A model that is only evaluated, TRL's reference say, is treated like the trained one."""
        super().create_accelerator_and_postprocess()
        if not self._streams() and self.lowmem.compute == "model":
            return
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> Any:
            if evaluation_mode:
                self._attach(model, self.args.device)
            return prepare(model, *args, evaluation_mode=evaluation_mode, **kwargs)

        self.accelerator.prepare_model = prepare_model

    def _attach(self, model: nn.Module, device: torch.device) -> None:
        share, streamer = share_of(self.lowmem, torch.device(device)), streamer_of(model)
        if self.lowmem.compute == "auto":
            self.lowmem = self.lowmem.replaced(compute=chosen_compute(self.lowmem, torch.device(device)))
            print(f'hf_lowmem: what linear layers compute in: compute="{self.lowmem.compute}"')
        use_compute(model, self.lowmem, torch.device(device))
        wanted = share or self.lowmem.weights != "model"
        if wanted and streamer is not None:
            check_attached(model, streamer, self.lowmem, torch.device(device))
        if wanted and streamer is None:
            attach(model, self.lowmem, device)
        elif streamer is None:
            widen_gradients(model, self.lowmem, torch.device(device))
        elif streamer is not None and self.lowmem.gradient_dtype in ("stochastic", "auto"):  # as it is attached
            add_stochastically(model)
        all_stay = self.lowmem.offload != "none" and torch.device(device).type == "cuda"  # offload="0"
        if streamer_of(model) is not None or all_stay:  # attached here, by load, or by the user
            use_chunked_loss(model)

    def _streams(self) -> bool:
        model = getattr(self, "model", None)
        attaches = self.lowmem.offload_share > 0 or self.lowmem.weights != "model"
        return attaches or (model is not None and streamer_of(model) is not None)

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
            kwargs = {**adam_settings(self.args), **state_settings(self.lowmem, target, self.args)}
            self.optimizer_cls_and_kwargs = (LowBitAdamW, kwargs)
        optimizer = super().create_optimizer(model)
        target = self.model if model is None else model
        streamer = None if target is None else streamer_of(target)
        if streamer is not None and self.lowmem.offload == "none" and all(block.kept for block in streamer.blocks):
            stays, streamer.updates = False, unwrapped(optimizer)  # weights in few bits: nothing else is asked for
            unwrapped(optimizer).use_codes(streamer.codes())
        elif streamer is not None and (self._placement is None or self._placement.streamer is not streamer):
            stays = self._place(target, streamer, unwrapped(optimizer))
        else:  # nothing is to be streamed
            stays = streamer is not None or (self.lowmem.offload != "none" and keep_on_device(unwrapped(optimizer)))
        check_gradients(target, self.lowmem, stays)
        if self.lowmem.gradient_dtype == "auto" and target is not None:
            chosen = "fp32" if sums_of(target) is None else "stochastic"
            print(f'hf_lowmem: how gradients of several micro-batches are added: gradient_dtype="{chosen}"')
        return optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """See ``Trainer``. States that go to a drive are read from the checkpoint's file, not through RAM."""
        mapped = serialization.patch("load.mmap", True)  # type: ignore[attr-defined]
        with mapped if self.lowmem.nvme_path else contextlib.nullcontext():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _place(self, model: nn.Module, streamer: Streamer, optimizer: LowBitAdamW) -> bool:
        """Lets the optimizer work block by block. Raises: DoesNotFit where no batch whatever could be trained.

        Returns: whether what is on the GPU is updated there.
        """
        on_device = overlap(streamer, optimizer)
        if self._inputs is not None:
            self._inputs.remove()
        if self._split is not None:
            self._split.remove()
        self._inputs = self._split = self._placement = None
        streamed = {p for block in streamer.blocks for _, p in block.params}
        outside = footprint((p for p in model.parameters() if p not in streamed), optimizer.widths())
        memory = memory_of(streamer.link.device, self.lowmem.gpu_bytes)
        automatic = self.lowmem.offload == "auto"
        ram_budget = self.lowmem.cpu_bytes or ram_bytes()
        check_budgets(
            streamer,
            optimizer,
            outside,
            memory.limit if memory is not None else self.lowmem.gpu_bytes,
            ram_budget,
            movable=automatic,
            on_device=on_device,
            gradients_rest=not self._unclipped(),
            drive=bool(self.lowmem.nvme_path),
        )
        moved = self._move_later(streamer, optimizer, outside, ram_budget, on_device)
        if automatic and memory is not None:
            ref = weakref.ref(self)

            def offload_inputs() -> int:
                trainer = ref()
                return 0 if trainer is None else trainer._offload_inputs()

            self._placement = Placement(
                streamer,
                optimizer,
                outside,
                memory,
                moved,
                on_device,
                ram_budget,
                offload_inputs=offload_inputs if self.lowmem.offload_activations is None else None,
                drive=bool(self.lowmem.nvme_path),
            )
        else:
            moved()
        self._hook_steps(optimizer)
        return on_device

    def _move_later(
        self, streamer: Streamer, optimizer: LowBitAdamW, outside: Footprint, ram_budget: int, on_device: bool
    ) -> Callable[[], object]:
        """What is to be called when blocks have moved, and once where none will."""
        folders, rests, report = self.lowmem.nvme_path, not self._unclipped(), [""]

        def moved() -> None:
            overlap(streamer, optimizer)
            if not folders:
                return
            how = {"on_device": on_device, "gradients_rest": rests}
            rest, where = rest_on_drives(streamer, optimizer, folders, outside, ram_budget, **how), ", ".join(folders)
            each = readable(rest.on_drive.total)
            said = f"hf_lowmem: states of {rest.blocks} blocks rest on {where}: a step reads and writes {each}"
            if said != report[0] and (rest.blocks or report[0]):
                report[0] = said
                print(said)

        return moved

    def _hook_steps(self, optimizer: LowBitAdamW) -> None:
        """Blocks move at the last moment before a step, for callbacks may write weights until then; the next forward
        begins at the first moment after it, unless somebody may write some before that."""
        for handle in self._step_hooks:
            handle.remove()
        ref = weakref.ref(self)

        def before(*args: Any) -> None:
            if (trainer := ref()) is not None:
                trainer._before_update()

        def after(*args: Any) -> None:
            trainer = ref()
            streamer = None if trainer is None or trainer.model is None else streamer_of(trainer.model)
            if streamer is not None and not looked_at(trainer):
                streamer.begin()

        self._step_hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def _before_step(self) -> None:
        """Before the first micro-batch of a step; also where somebody's own ``training_step`` does not call ours."""
        self._split_batches()
        if self.lowmem.offload_activations or self._inputs is not None:
            self._offload_inputs()
        if self._placement is not None:
            self._placement.before_forward(0)

    def _before_update(self) -> None:
        """When the gradients of a step are there."""
        placement = self._placement
        if placement is None:
            return
        measured = placement.plan is None
        placement.before_update()
        if measured and placement.plan is not None and placement.plan.streamed and not any_checkpointed(self.model):
            placement.report(
                "hf_lowmem: every activation stays on the GPU until backward; with gradient_checkpointing=True more "
                "blocks could stay there instead"
            )

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
        ahead, self._norm_ahead = self._norm_ahead, None
        norm = None if ahead is None else ahead.of(params)
        if norm is None:
            unscaled = self.accelerator.scaler is not None  # in place, which torch's counter of writes does not see
            norm = total_norm(params, None if unscaled else streamer_of(model))
        finite, factor = self._clipping(norm, max_norm)
        grads = [] if finite else [p.grad for p in params if p.grad is not None]
        if not finite and all(bool(g.isfinite().all()) for g in grads):  # the gradients' own dtype was too narrow
            norm = torch.stack([g.double().norm().to(norm.device) for g in grads]).norm()
            finite, factor = self._clipping(norm, max_norm)
        unwrapped(self.optimizer).scale_gradients(factor if finite else 1.0, finite)
        return norm

    @staticmethod
    def _clipping(norm: Tensor, max_norm: float) -> tuple[bool, float]:
        """Whether a norm is finite, and the factor that clips it. Waits for the device, once."""
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        finite, clipped = torch.stack([norm.isfinite().to(factor.dtype), factor]).tolist()
        return bool(finite), clipped


class LowMemTrainer(LowMemMixin, Trainer):
    """``transformers.Trainer`` with ``LowBitAdamW``; ``LowMemMixin`` has the one argument more."""
