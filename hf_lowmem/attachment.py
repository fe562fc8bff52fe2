"""Finds a model's blocks, lays them on a shelf, and hangs a ``Streamer`` on the model."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .config import LowMemConfig
from .link import CudaLink, HostLink
from .shelf import RamShelf
from .stream import Block, Streamer

# Trained parameters that take no more than this share of a block's bytes, beside frozen ones, stay on the device: they
# are adapters or norms, which many small copies would hold up more than their bytes are worth.
SMALL_SHARE = 0.05
_attached: weakref.WeakKeyDictionary[nn.Module, Streamer] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, config: LowMemConfig, device: torch.device | str | None = None) -> Streamer | None:
    """Streams a model's blocks from host memory, as ``config.offload`` says, and moves the rest of it to the device.

    From here on every streamed parameter is an ordinary tensor in host memory whenever no forward or backward is under
    way, and ``model.to()`` leaves it there.

    Args:
        model: a model of transformers, or one with an ``nn.ModuleList`` of equal blocks; also within PEFT's wrappers.
            Its dtypes are final: cast it before.
        config: ``offload`` and ``debug`` are read.
        device: where it computes. None: the current CUDA device, or host memory where there is none.

    Returns:
        The streamer; None with ``offload="none"``.

    Raises:
        ValueError: the model has no blocks that could be streamed, or it is attached already.
    """
    share = config.offload_share
    if share == 0:
        return None
    if model in _attached:
        raise ValueError(f"{type(model).__name__} is attached already: call detach(model) before it is attached anew")
    return hang(model, streamed_blocks(model, share), device_or_default(device), config.debug)


def hang(
    model: nn.Module, blocks: list[Block], device: torch.device, debug: bool, shelf: RamShelf | None = None
) -> Streamer:
    """Attaches these blocks of a model: on the shelf given, where their weights may be already, or else a new one."""
    if shelf is None:
        shelf = RamShelf([b.layer for b in blocks], [b.gradient_layer for b in blocks], pin=device.type == "cuda")
    link = CudaLink(_with_index(device)) if device.type == "cuda" else HostLink()
    streamer = Streamer(model, blocks, shelf, link, debug=debug)
    for block in blocks:
        _keep_home(block)
    model.to(device)
    _attached[model] = streamer
    return streamer


def detach(model: nn.Module) -> None:
    """Takes the streamer off a model. Its streamed parameters stay where they are, in host memory.

    Raises: ValueError if none is attached.
    """
    streamer = _attached.pop(model, None)
    if streamer is None:
        raise ValueError(f"{type(model).__name__} has no streamer: attach(model, config) has not been called on it")
    streamer.remove()
    for block in streamer.blocks:
        for module, _ in _owners(block):
            module.__dict__.pop("_apply", None)


def streamer_of(model: nn.Module) -> Streamer | None:
    """The streamer that ``attach`` has hung on the model, or on one that it wraps."""
    return next((_attached[module] for module in model.modules() if module in _attached), None)


# -- what is streamed ---------------------------------------------------------------------------------------------
def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks, in the order of its modules: those that transformers checkpoints, or else the
    largest list of equal modules.

    Raises: ValueError if it has neither.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found.append((name, module))
    if found:
        return found
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and _alike(m)]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no blocks that could be streamed: no layer that transformers can checkpoint, "
            'and no nn.ModuleList of two or more equal modules. Write offload="none"'
        )
    name, largest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return [(f"{name}.{i}" if name else str(i), module) for i, module in enumerate(largest)]


def _alike(modules: nn.ModuleList) -> bool:
    return len(modules) > 1 and len({type(m) for m in modules}) == 1 and any(True for _ in modules[0].parameters())


def streamed_blocks(model: nn.Module, share: Fraction) -> list[Block]:
    """The blocks of this share of all blocks, evenly spread, with those of their parameters that are theirs alone."""
    found = find_blocks(model)
    count = len(found)
    chosen = [found[i] for i in range(count) if int((i + 1) * share) > int(i * share)]
    users = _users_of_parameters(model, found)
    blocks = []
    for name, module in chosen:
        own = [(n, p) for n, p in module.named_parameters() if users[p] == 1]
        params = _without_small_trained(own)
        if params:
            blocks.append(Block(name, module, params))
    if not blocks:
        raise ValueError(
            f"none of the {count} blocks of {type(model).__name__} has parameters that are its own alone, so nothing "
            'can be streamed. Write offload="none"'
        )
    return blocks


def _users_of_parameters(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Counter[nn.Parameter]:
    """In how many blocks each parameter is, what lies outside of them counting as one more."""
    users: Counter[nn.Parameter] = Counter()
    inside = set()
    for module in {module for _, module in blocks}:
        users.update(set(module.parameters()))
        inside |= {id(m) for m in module.modules()}
    outside = {p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    users.update(outside)
    return users


def _without_small_trained(params: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    frozen = [(name, p) for name, p in params if not p.requires_grad]
    trained = sum(p.nbytes for _, p in params if p.requires_grad)
    if frozen and trained <= SMALL_SHARE * sum(p.nbytes for _, p in params):
        return frozen
    return params


# -- where it stays -----------------------------------------------------------------------------------------------
def _owners(block: Block) -> Iterator[tuple[nn.Module, list[str]]]:
    """Each module of a block that holds streamed parameters, and their names in it."""
    streamed = {p for _, p in block.params}
    for module in block.module.modules():
        names = [name for name, p in module._parameters.items() if p in streamed]
        if names:
            yield module, names


def _keep_home(block: Block) -> None:
    """Makes ``.to()`` and its like pass the streamed parameters over. The Trainer and Accelerate call it again."""
    for module, names in _owners(block):
        module._apply = functools.partial(_apply_to_the_rest, weakref.ref(module), tuple(names))  # type: ignore[method-assign]


def _apply_to_the_rest(
    ref: weakref.ref[nn.Module], names: tuple[str, ...], fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    module = ref()
    assert module is not None
    streamed = {name: module._parameters[name] for name in names}
    for name, p in streamed.items():
        wanted = fn(torch.empty(0, dtype=p.dtype)).dtype  # type: ignore[union-attr]
        if wanted != p.dtype:  # type: ignore[union-attr]
            raise ValueError(
                f"{type(module).__name__}.{name} is streamed in {p.dtype} and cannot be cast to {wanted} now: "  # type: ignore[union-attr]
                "cast the model before it is attached, or call detach(model) first"
            )
        module._parameters[name] = None
    try:
        return type(module)._apply(module, fn, recurse)
    finally:
        module._parameters.update(streamed)


def device_or_default(device: torch.device | str | None) -> torch.device:
    """None is the current CUDA device, or host memory where there is none."""
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
