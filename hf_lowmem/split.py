"""``BatchSplit``: blocks that compute a batch in parts, one after another, while their weights are on the device.

With gradient accumulation every micro-batch has all weights cross the link, twice. Here they cross as for one batch,
and what a block needs of the device while it computes is that of one part; its inputs are those of the whole batch.

The loss is that of the batch, so its normalization is exact. Values and gradients are those of the unsplit batch but
for the order of sums: a block's weight gradients are summed over the parts in the weights' dtype, as gradient
accumulation sums them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .checkpointing import InPlace, is_checkpointed, put_outermost, standing, take_out

# Arguments of layers that have a row for each sample, or one row for all, and the numbers of dimensions that say so:
# others have a row for each head, token or expert, whose number may be that of the samples.
BATCHED = {
    "hidden_states": (3, 4),
    "attention_mask": (2, 4),
    "causal_mask": (4,),
    "position_ids": (2,),
    "position_embeddings": (3, 4),
    "position_embeddings_global": (3, 4),
    "position_embeddings_local": (3, 4),
    "position_bias": (4,),
    "per_layer_input": (3, 4),
    "token_type_ids": (2,),
    "encoder_hidden_states": (3,),
    "encoder_attention_mask": (2, 4),
    "encoder_decoder_position_bias": (4,),
}
SHARED = frozenset({"cache_position"})  # by all samples


class Whole(Protocol):
    """Somebody who has to know where a block's computing of the whole batch begins and ends; see ``Streamer.whole``."""

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]: ...
    def end(self, out: Any) -> None: ...


def check_splittable(model: nn.Module) -> None:
    """Raises: ValueError where a loss of the model's is made of what its blocks tell beside their output."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            f"micro_batch_size cuts a batch within its blocks, and the auxiliary loss of {type(model).__name__} "
            "(output_router_logits=True) takes what its routers say of a whole batch: leave micro_batch_size out, or "
            "set model.config.output_router_logits=False"
        )


class BatchSplit:
    """Has a model's checkpointed blocks compute a batch in parts.

    Args:
        modules: the blocks.
        rows: samples of a part.
        whole: who is to know of a block's beginning and end; asked for each block and forward. None: nobody.
    """

    def __init__(
        self, modules: Sequence[nn.Module], rows: int, whole: Callable[[nn.Module], Whole | None] | None = None
    ) -> None:
        self.modules, self.rows, self.whole = list(modules), rows, whole

    def install(self) -> int:
        """Takes the place of the blocks' checkpoint functions, where that has not been done. Returns: of how many."""
        checkpointed = [module for module in self.modules if is_checkpointed(module)]
        for module in checkpointed:
            if self._ours(module) is None:
                put_outermost(module, functools.partial(_Split, self, module))
        return len(checkpointed)

    def remove(self) -> None:
        """Puts back what was there."""
        for module in self.modules:
            ours = self._ours(module)
            if ours is not None:
                take_out(module, ours)

    def _ours(self, module: nn.Module) -> _Split | None:
        return next((x for x in standing(module) if isinstance(x, _Split) and x.split is self), None)


class _Split(InPlace):
    """A block's checkpoint function that is called for each part of a batch.

    Args:
        split: whose it is.
        module: the block.
        function: the block's own checkpoint function.
    """

    def __init__(self, split: BatchSplit, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.split, self.module = split, module

    def __call__(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        given = forward if isinstance(forward, functools.partial) else functools.partial(forward)
        keywords = dict(given.keywords)
        batch = next((x for x in args if isinstance(x, Tensor)), None)
        rows = self.split.rows
        if batch is None or batch.dim() < 3 or len(batch) <= rows or not torch.is_grad_enabled():
            return self.function(forward, *args, **options)
        _refuse_captured()
        splitter = _Splitter(type(self.module).__name__, len(batch), rows)
        names = list(inspect.signature(self.module.forward).parameters)
        others = [(name, x) for name, x in zip(names, args, strict=False) if x is not batch]
        splitter.check({**dict(others), **keywords})
        whole = None if self.split.whole is None else self.split.whole(self.module)
        if whole is not None:
            args, keywords = whole.begin(args, keywords)
        out = None
        try:
            parts = zip(splitter.split(args), splitter.split(keywords), strict=True)
            outs = [
                self.function(functools.partial(given.func, *given.args, **kwargs), *positional, **options)
                for positional, kwargs in parts
            ]
            out = splitter.join(outs)
        finally:
            if whole is not None:
                whole.end(out)
        return out


def _refuse_captured() -> None:
    """Raises: ValueError where transformers notes what its layers compute, which it would do for each part."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    wanted = None if collector is None else collector.get()
    if wanted:
        names = ", ".join(f"output_{name}" for name in wanted if not name.startswith("_"))
        raise ValueError(
            f"micro_batch_size cuts a batch within its blocks, and {names} collects what these compute for whole ones: "
            "leave one of the two out"
        )


class _Splitter:
    """Cuts a block's arguments into parts of so many samples, and joins what it returns for them.

    Args:
        name: of the block's class, for messages.
        batch: number of samples.
        rows: samples of a part.
    """

    def __init__(self, name: str, batch: int, rows: int) -> None:
        self._name, self._batch = name, batch
        self._sizes = [min(rows, batch - start) for start in range(0, batch, rows)]

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises: ValueError where it is not known how an argument is to be cut."""
        for name, value in arguments.items():
            if name in SHARED:
                continue
            for x in tree_flatten(value)[0]:
                scalar = isinstance(x, Tensor) and x.dim() == 0
                plain = scalar or x is None or isinstance(x, bool | int | float | str | torch.dtype | torch.device)
                known = isinstance(x, Tensor) and x.dim() in BATCHED.get(name, ()) and len(x) in (1, self._batch)
                if not plain and not known:
                    what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                    raise ValueError(
                        f"micro_batch_size cuts a batch of {self._batch} within its blocks, and the argument {name} of "
                        f"{self._name}, {what}, may have a row for each sample or not: leave micro_batch_size out, and "
                        "write a smaller per_device_train_batch_size with gradient_accumulation_steps"
                    )

    def split(self, x: Any, key: str = "") -> list[Any]:
        """One value for each part."""
        count = len(self._sizes)
        if isinstance(x, Tensor) and x.dim() > 0 and len(x) == self._batch and key not in SHARED:
            return list(torch.split(x, self._sizes))
        if isinstance(x, dict):
            values = {key: self.split(value, key) for key, value in x.items()}
            return [{key: value[i] for key, value in values.items()} for i in range(count)]
        if isinstance(x, list | tuple):
            elements = [self.split(value, key) for value in x]
            parts = [[element[i] for element in elements] for i in range(count)]
            return [type(x)(*part) if hasattr(x, "_fields") else type(x)(part) for part in parts]
        return [x] * count

    def join(self, outs: Sequence[Any]) -> Any:
        """Raises: ValueError where the block has returned something else than samples."""
        first = outs[0]
        if isinstance(first, Tensor):
            if [len(out) if out.dim() else 0 for out in outs] != self._sizes:
                raise ValueError(
                    f"micro_batch_size cuts a batch within its blocks, and {self._name} returns a tensor of shape "
                    f"{tuple(first.shape)} for {self._sizes[0]} samples, which cannot be joined: leave "
                    "micro_batch_size out"
                )
            return torch.cat(list(outs))
        if isinstance(first, list | tuple) and type(first) in (list, tuple):
            return type(first)(self.join([out[i] for out in outs]) for i in range(len(first)))
        if first is None:
            return None
        raise ValueError(
            f"micro_batch_size cuts a batch within its blocks, and {self._name} returns {type(first).__name__}, which "
            "cannot be joined: leave micro_batch_size out"
        )
