"""Finds a model's blocks, lays them on a shelf, and hangs a ``Streamer`` on the model."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .block import Block
from .checkpointing import take_all_out
from .config import LowMemConfig
from .kernels.weights import FORMS, WeightForm
from .layer import gradient_dtype
from .link import CudaLink, HostLink
from .loss import use_stock_loss
from .lowbit import layer_weights, use_compute
from .memory import ram_bytes, use_expandable_segments
from .plan import Footprint, Plan, footprint, spread
from .scaler import wait_for_scales
from .shelf import RamShelf
from .stream import AHEAD, Streamer
from .sums import StochasticSums, forget_sums, sums_of

# Trained parameters that take no more than this share of a block's bytes, beside frozen ones, stay on the device: they
# are adapters or norms, which many small copies would hold up more than their bytes are worth.
SMALL_SHARE = 0.05
_STREAMER = "_hf_lowmem_streamer"  # an attribute of each streamed block
_WIDENED = "_hf_lowmem_widened"  # of a model whose gradients we have given another dtype


def attach(model: nn.Module, config: LowMemConfig, device: torch.device | str | None = None) -> Streamer | None:
    """Streams a model's blocks from host memory, as ``config.offload`` says, and moves the rest of it to the device.

    From here on every streamed parameter is an ordinary tensor in host memory whenever no forward or backward is under
    way, and ``model.to()`` leaves it there.

    Args:
        model: a model of transformers, or one with an ``nn.ModuleList`` of equal blocks; also within PEFT's wrappers.
            Its dtypes are final: cast it before.
        config: ``offload``, ``weights``, ``gradient_dtype``, ``compute``, ``grad_weight`` and ``debug`` are read.
        device: where it computes. None: the current CUDA device, or host memory where there is none.

    Returns:
        The streamer; None with ``offload="none"``, but for weights in few bits.

    Raises:
        TypeError: ``config`` is none.
        ValueError: the model has no blocks that could be streamed, or it, or one within or around it, is attached.
        DoesNotFit: the weights alone are more than the budgets, or the machine, have room for.
    """
    if isinstance(config, Mapping):
        config = LowMemConfig.from_dict(config)
    if not isinstance(config, LowMemConfig):
        raise TypeError(
            f'attach takes a LowMemConfig, not {config!r}: write attach(model, LowMemConfig(offload="cpu"))'
        )
    where = device_or_default(device)
    share, attached = share_of(config, where), streamer_of(model) is not None
    if not attached:
        widen_gradients(model, config, where)
        use_compute(model, config, where)
    if share == 0 and config.weights == "model":
        model.to(where)
        return None
    if attached:
        raise ValueError(
            f"{type(model).__name__}, or a model within it or around it, is attached already: call detach(model) "
            "before it is attached anew"
        )
    blocks = blocks_of(model, config, where)
    check_room(model, blocks, config, where)
    return hang(model, blocks, config, where)


def widen_gradients(model: nn.Module, config: LowMemConfig, device: torch.device) -> None:
    """Has gradients of 16-bit weights added as ``gradient_dtype`` says; before blocks are laid out.

    Raises: ValueError where this torch cannot, or there are gradients already.
    """
    wanted = config.gradient_dtype
    forget_sums(model)  # of an earlier training, or of parameters that are others now
    if wanted == "auto":
        wanted = "fp32" if _has_room_for_wide(model, config, device) else "stochastic"
    if wanted != "fp32":
        _narrow_gradients(model)
        if wanted == "stochastic":
            StochasticSums(model)
        return
    vars(model)[_WIDENED] = True
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) and gradient_dtype(p) is not torch.float32:
            if not hasattr(p, "grad_dtype") or p.grad is not None:
                why = f"{name} has a gradient already" if p.grad is not None else f"torch {torch.__version__} has none"
                raise ValueError(
                    f'gradient_dtype="fp32" gives gradients another dtype than their weights, and {why}: leave it out'
                    f"{', or call model.zero_grad() first' if p.grad is not None else ', or install a newer torch'}"
                )
            p.grad_dtype = torch.float32


def gradients_are_as_wanted(model: nn.Module, config: LowMemConfig) -> bool:
    """Whether gradients of a model are added as ``gradient_dtype`` says."""
    wide = bool(vars(model).get(_WIDENED, False))
    stochastic = sums_of(model) is not None
    wanted = {"model": True, "fp32": wide, "stochastic": stochastic, "auto": wide or stochastic}
    return wanted[config.gradient_dtype]


def _narrow_gradients(model: nn.Module) -> None:
    """Undoes what ``widen_gradients`` has done; what others have set stays."""
    if vars(model).pop(_WIDENED, False):
        for p in model.parameters():
            if p.grad is None and gradient_dtype(p) is not p.dtype:
                p.grad_dtype = p.dtype


def _has_room_for_wide(model: nn.Module, config: LowMemConfig, device: torch.device) -> bool:
    """Whether gradients in fp32 fit host memory beside all that may rest there, and this torch and device take them."""
    params = list(model.parameters())
    narrow = [p for p in params if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not all(hasattr(p, "grad_dtype") for p in narrow) or (device.type == "cuda" and not find_spec("triton")):
        return False
    if narrow and all(gradient_dtype(p) is torch.float32 for p in narrow):
        return True  # it has been decided before
    if any(p.grad is not None for p in narrow):
        return False
    home = footprint(params, {p: (config.state_bits, config.master_bits) for p in params if p.requires_grad})
    room = config.cpu_bytes or int(0.9 * ram_bytes())  # the system and the script are there too
    return home.total + sum((4 - p.itemsize) * p.numel() for p in narrow) <= room


def share_of(config: LowMemConfig, device: torch.device) -> Fraction:
    """The share of the blocks that are streamed at first. Where there is no GPU, ``auto`` has nothing to save."""
    nothing_to_save = config.offload == "auto" and device.type == "cpu" and config.gpu_memory is None
    return Fraction(0) if nothing_to_save else config.offload_share


def hang(
    model: nn.Module, blocks: list[Block], config: LowMemConfig, device: torch.device, shelf: RamShelf | None = None
) -> Streamer:
    """Attaches these blocks of a model: on the shelf given, where their weights may be already, or else a new one."""
    if shelf is None:
        shelf = shelf_of(blocks, device)
    if device.type == "cuda":
        use_expandable_segments()
        wait_for_scales()
    link = CudaLink(_with_index(device)) if device.type == "cuda" else HostLink()
    streamer = Streamer(model, blocks, shelf, link, debug=config.debug)
    for block in blocks:
        _keep_home(block)
        vars(block.module)[_STREAMER] = streamer
    inside = {m for block in blocks for m in block.module.modules()}
    for module in model.modules():
        if module not in inside:
            module._apply = functools.partial(_apply_after_a_look, weakref.ref(module))  # type: ignore[method-assign]
    model.to(device)
    passing = set(spread(len(blocks), share_of(config, device))) if config.weights != "model" else range(len(blocks))
    for number, block in enumerate(blocks):
        if number not in passing:
            streamer.keep(block)
    return streamer


def shelf_of(blocks: list[Block], device: torch.device) -> RamShelf:
    """A place in host memory for these blocks."""
    layers, gradients, coded = zip(*((b.layer, b.gradient_layer, b.coded_layer) for b in blocks), strict=True)
    return RamShelf(layers, gradients, pin=device.type == "cuda", coded=coded)


def detach(model: nn.Module) -> None:
    """Takes the streamer off a model. Its streamed parameters stay where they are, in host memory.

    Args:
        model: the one that was attached, or one within it or around it (PEFT's wrapper, say).

    Raises: ValueError if none is attached.
    """
    streamer = streamer_of(model)
    if streamer is None:
        raise ValueError(
            f"{type(model).__name__} has no streamer: attach(model, config) has not been called on it, or with "
            'offload="none"'
        )
    streamer.remove()
    for owner in model.modules():
        _narrow_gradients(owner)
    forget_sums(model)
    for module in {*model.modules(), *(m for block in streamer.blocks for m in block.module.modules())}:
        if isinstance(vars(module).get("_apply"), functools.partial):
            del module._apply
        vars(module).pop(_STREAMER, None)
    for module in model.modules():
        take_all_out(module)
    use_stock_loss(model)


def streamer_of(model: nn.Module) -> Streamer | None:
    """The streamer that ``attach`` has hung on the model, or on one within it or around it."""
    return next((vars(module)[_STREAMER] for module in model.modules() if _STREAMER in vars(module)), None)


def check_attached(model: nn.Module, streamer: Streamer, config: LowMemConfig, device: torch.device) -> None:
    """Raises: ValueError where a model is attached in another way than a config says. ``offload="none"``: in any."""
    forms = {form.name for block in streamer.blocks for form in block.forms.values()} or {"model"}
    passing = sum(not block.kept for block in streamer.blocks)
    bare = any(block.bare for block in streamer.blocks)
    if bare != (config.master_bits == 8):
        raise ValueError(
            f"{type(model).__name__} is attached with {'' if bare else 'other masters than '}master_bits=8, and this "
            f"config says master_bits={config.master_bits}: write the same, or call detach(model) first"
        )
    if config.weights == "model":
        fits = len(streamed_blocks(model, share_of(config, device))) == len(streamer.blocks)
    else:
        fits = config.offload == "auto" or passing == len(spread(len(streamer.blocks), share_of(config, device)))
    if {config.weights} != forms or (config.offload != "none" and not fits):
        raise ValueError(
            f"{config.resting} is not how {type(model).__name__} is attached, with {passing} streamed blocks and "
            f'weights="{forms.pop()}": call detach(model) first, or leave it so with offload="none" and these weights'
        )


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


def blocks_of(model: nn.Module, config: LowMemConfig, device: torch.device) -> list[Block]:
    """The blocks that a streamer is to know: those that are streamed. All, where their weights are seen in few bits:
    those that stay on the device are too.
    """
    if config.weights == "model":
        return streamed_blocks(model, share_of(config, device))
    form = FORMS[config.weights]
    forms = {p: form for p in layer_weights(model) if form.takes(tuple(p.shape))}
    if not forms:
        raise ValueError(
            f"{type(model).__name__} has no weight that could be written as {form.name}: none of a plain nn.Linear, "
            f"Conv1D or experts whose rows have a multiple of {form.group or 1} values"
        )
    bare = config.master_bits == 8
    if bare and form.bits == 4 and any(p.requires_grad for p in forms):
        raise ValueError(
            'weights="int4" with master_bits=8 are weights that exist in 4 bits alone, which cannot be trained: write '
            'master_bits=24, or weights="int8"'
        )
    return streamed_blocks(model, Fraction(1), forms, bare)


def streamed_blocks(
    model: nn.Module, share: Fraction, forms: Mapping[nn.Parameter, WeightForm] | None = None, bare: bool = False
) -> list[Block]:
    """The blocks of this share of all blocks, evenly spread, with those of their parameters that are theirs alone.

    Args:
        forms: of the weights that cross the link in few bits.
        bare: whether these exist in few bits alone.
    """
    found = find_blocks(model)
    count = len(found)
    chosen = [found[i] for i in spread(count, share)]
    if not chosen:
        raise ValueError(
            f"offload={float(share):g} of the {count} blocks of {type(model).__name__} is less than one block: write "
            f'1/{count} or more, or offload="none"'
        )
    users = _users_of_parameters(model, found)
    blocks = []
    for name, module in chosen:
        own = [(n, p) for n, p in module.named_parameters() if users[p] == 1]
        params = _without_small_trained(own)
        if params:
            coded = {p: forms[p] for _, p in params if forms and p in forms}
            blocks.append(Block(name, module, params, coded, bare and bool(coded)))
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


def check_room(model: nn.Module, blocks: list[Block], config: LowMemConfig, device: torch.device) -> None:
    """Raises: DoesNotFit if there is no room for the weights alone. They need not have memory yet."""
    streamed = {p for block in blocks for _, p in block.params}
    outside = sum(p.nbytes for p in model.parameters() if p not in streamed)
    sizes = [(block.layer.nbytes, (block.coded_layer or block.layer).nbytes) for block in blocks]
    passing = max(whole + AHEAD * coming for whole, coming in sizes)
    gpu_budget = config.gpu_bytes
    if gpu_budget is None and device.type == "cuda":
        gpu_budget = torch.cuda.mem_get_info(device)[1]
    plan = Plan(
        blocks=len(blocks),
        streamed=len(blocks),
        on_gpu=Footprint(weights=outside),
        in_ram=Footprint(weights=sum(b.copied_bytes + sum(b.nbytes_of(p) for _, p in b.params) for b in blocks)),
        work=passing,
        gpu_budget=gpu_budget,
        ram_budget=config.cpu_bytes or ram_bytes(),
    )
    half = sum(p.nbytes // 2 for p in streamed if p.dtype is torch.float32)
    plan.check({'dtype="bfloat16"': (0, half)})


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
        module._apply = functools.partial(_apply_to_the_rest, weakref.ref(module), block, tuple(names))  # type: ignore[method-assign]


def _apply_to_the_rest(
    ref: weakref.ref[nn.Module],
    block: Block,
    names: tuple[str, ...],
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> Any:
    module = ref()
    assert module is not None
    streamed = {} if block.kept and not block.forms else {name: module._parameters[name] for name in names}
    for name, p in streamed.items():
        assert p is not None
        _check_cast(f"{type(module).__name__}.{name}", p, fn)
    for name in streamed:
        module._parameters[name] = None
    try:
        return type(module)._apply(module, fn, recurse)
    finally:
        module._parameters.update(streamed)


def _apply_after_a_look(ref: weakref.ref[nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``_apply`` of a module around streamed blocks: a cast is refused before anything has been cast."""
    module = ref()
    assert module is not None
    streamer = streamer_of(module) if recurse else None
    for block in streamer.blocks if streamer is not None else ():
        for name, p in () if block.kept and not block.forms else block.params:
            _check_cast(f"{block.name}.{name}", p, fn)
    return type(module)._apply(module, fn, recurse)


def _check_cast(name: str, p: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    wanted = fn(torch.empty(0, dtype=p.dtype)).dtype
    if wanted != p.dtype:
        raise ValueError(
            f"{name} is streamed in {p.dtype} and cannot be cast to {wanted} now: cast the model before it is "
            "attached, or call detach(model) first"
        )


def device_or_default(device: torch.device | str | None) -> torch.device:
    """None is the current CUDA device, or host memory where there is none."""
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
