"""Saves a model whose weights are seen in 8 or 4 bits with these very bits, as torchao or bitsandbytes has them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from .attachment import blocks_of, streamer_of
from .coding import decode, encode
from .config import LowMemConfig
from .kernels.weights import FORMS, WeightForm, empty, levels

FORMATS = {"torchao": ("int8", "int4"), "bitsandbytes": ("int8",)}
State = dict[str, Tensor]


class Saved(NamedTuple):
    """What ``save_quantized`` has made of the weights that are seen in few bits.

    Args:
        quantized: names of the layers that are saved as codes and scales.
        decoded: names of the weights that the format has no place for. They are saved in the model's own dtype, as
            their codes say.
    """

    quantized: list[str]
    decoded: list[str]


class _Library(NamedTuple):
    """A format: the setting of transformers for it, and how a layer's weight is written."""

    config: Callable[[list[str]], Any]  # of the names of what is not quantized
    write: Callable[[str, torch.dtype, Tensor, Tensor], State]  # a layer's name, its weight's dtype, codes and scales
    describe: Callable[[State], dict[str, str]]  # what the files' headers say beside


def save_quantized(
    model: nn.Module,
    folder: str | Path,
    weights: str | None = None,
    format: str = "torchao",
    max_shard_size: int | str | None = None,
) -> Saved:
    """Saves a model so that stock transformers loads it with its linear layers in 8 or 4 bits.

    The codes and scales are those that the device sees: on a model that is attached with ``master_bits=8``, where they
    are all that exists, as they lie; otherwise those of the weights at home, written one by one. transformers'
    ``save_pretrained`` makes the files. What it writes is in RAM once, beside the model. Call it in one process.

    Args:
        model: of transformers, streamed or not; it stays as it is.
        folder: to be written; made if there is none. No tokenizer is saved with it.
        weights: ``"int8"`` or ``"int4"``. None: as the model is attached.
        format: ``"torchao"``, or ``"bitsandbytes"`` for ``"int8"``.
        max_shard_size: as in ``save_pretrained``.

    Returns: which layers are in codes, and which weights the format could not hold so.

    Raises:
        ImportError: the library is not installed.
        TypeError: the model is none of transformers.
        ValueError: it has adapters, is quantized by another library, is attached with other weights, or has no layer
            that the format could hold; or the folder is a file.
    """
    if format not in FORMATS:
        raise ValueError(f'format={format!r} is neither "torchao" nor "bitsandbytes"')
    _check_model(model)
    assert isinstance(model, PreTrainedModel)
    if Path(folder).is_file():
        raise ValueError(f"{folder} is a file: name a folder")
    form = _form(model, weights)
    if form.name not in FORMATS[format]:
        raise ValueError(
            f'bitsandbytes has other 4-bit numbers (nf4, fp4) than weights="{form.name}": write format="torchao"'
        )
    library = _LIBRARIES[format](form)
    seen = _Seen(model, form)
    shell = _shell(model)
    layers = [
        name for name, module in shell.named_modules(remove_duplicate=False) if _holds(shell, name, module, model, seen)
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that {format} could hold as {form.name}: Conv1D, and experts "
            "of three dimensions, are none. model.save_pretrained saves its weights in their own dtype"
        )
    state, decoded = _state(model, layers, seen, library)
    quantizer = AutoHfQuantizer.from_config(library.config(_others(model, layers)))
    metadata = library.describe(state)
    # Its own way would be to take them from a model that holds them all, and copy them.
    vars(quantizer)["get_state_dict_and_metadata"] = lambda _: (state, metadata)
    shell.hf_quantizer = quantizer
    shell.config.quantization_config = quantizer.quantization_config
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    shell.save_pretrained(folder, **options)
    return Saved(layers, decoded)


def _check_model(model: nn.Module) -> None:
    if hasattr(model, "peft_config") or any("lora_" in name for name, _ in model.named_modules()):
        raise ValueError(
            f"{type(model).__name__} has adapters: save them alone by model.save_pretrained(folder), or call "
            "detach(model) if it is attached, and save model.merge_and_unload()"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is no model of transformers: pass the one that is within it, if any")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"{type(model).__name__} is quantized by another library: call model.save_pretrained(folder)")


def _form(model: nn.Module, weights: str | None) -> WeightForm:
    """The form to be written. Raises: ValueError where it is not the one that the device sees."""
    streamer = streamer_of(model)
    attached = {form.name for block in streamer.blocks for form in block.forms.values()} if streamer is not None else {}
    name = weights if weights is not None else next(iter(attached), None)
    if name not in FORMS:
        given = "weights is not given, and the model is not attached with any" if name is None else f"{weights=}"
        raise ValueError(f'{given}: write weights="int8" or weights="int4"')
    if attached and name not in attached:
        raise ValueError(
            f'the model is attached with weights="{next(iter(attached))}", and would be another one with '
            f'weights="{name}": leave weights out, or call detach(model) first'
        )
    return FORMS[name]


class _Seen:
    """The weights of a model that the device sees in few bits, in RAM."""

    def __init__(self, model: nn.Module, form: WeightForm) -> None:
        streamer = streamer_of(model)
        blocks = streamer.blocks if streamer is not None else []
        self._alone: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        if streamer is not None:
            streamer.synchronize()
            self._alone = streamer.codes()
        if not any(block.forms for block in blocks):
            blocks = blocks_of(model, LowMemConfig(weights=form.name), torch.device("cpu"))
        self.form = form
        self.weights = {p for block in blocks for p in block.forms}

    def codes(self, p: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight."""
        pair = self._alone.get(p)
        if pair is None:
            pair = empty(tuple(p.shape), self.form, p.device)
            encode([(p.detach().contiguous(), self.form, *pair)])
        return pair[0].cpu(), pair[1].cpu()

    def decoded(self, p: nn.Parameter) -> Tensor:
        """What they stand for."""
        out = torch.empty(p.shape, dtype=p.dtype)
        decode([(*self.codes(p), self.form, out)])
        return out


def _shell(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without weights, as ``from_pretrained`` makes it. Raises: ValueError where it does not."""
    with torch.device("meta"):
        shell = type(model)(copy.deepcopy(model.config))
    nn.Module.to(shell, model.dtype)  # which the config will say
    if hasattr(model, "generation_config"):
        shell.generation_config = copy.deepcopy(model.generation_config)
    names, wanted = (
        {(name, p.shape) for name, p in m.named_parameters(remove_duplicate=False)} for m in (model, shell)
    )
    if names != wanted:
        raise ValueError(
            f"{type(model).__name__} is not what its config makes, and could not be loaded: it differs in "
            f"{min(names ^ wanted)[0]}"
        )
    return shell


def _holds(shell: PreTrainedModel, name: str, module: nn.Module, model: nn.Module, seen: _Seen) -> bool:
    """Whether a module becomes a quantized layer. transformers lets alone what a model wants in fp32."""
    if type(module) is not nn.Linear or model.get_submodule(name).weight not in seen.weights:
        return False
    return should_convert_module(name, list(shell._keep_in_fp32_modules or []))


def _others(model: nn.Module, layers: list[str]) -> list[str]:
    """The modules that have matrices and are none of these layers, as patterns for transformers.

    It takes a name for a regular expression that others may begin with, or end with: ``mlp.gate`` for ``mlp.gate_proj``
    too in older versions. Where it would, the pattern says where the name begins and ends.
    """
    known, patterns = set(layers), []
    for name, module in model.named_modules():
        if name in known or not any(p is not None and p.dim() > 1 for p in module._parameters.values()):
            continue
        unclear = any(re.match(name, layer) or layer.endswith(name) for layer in layers)
        patterns.append(rf"^{re.escape(name)}(?:\.|$)" if unclear else name)
    return patterns


def _state(model: nn.Module, layers: list[str], seen: _Seen, library: _Library) -> tuple[State, list[str]]:
    """What is to be saved, by name, and which weights of it are decoded."""
    known, state, decoded = set(layers), State(), []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for part, p in module._parameters.items():
            name = f"{prefix}.{part}" if prefix else part
            if p is None:
                continue
            if p not in seen.weights:
                state[name] = p.detach()
            elif prefix in known:
                state.update(library.write(prefix, p.dtype, *seen.codes(p)))
            else:
                state[name] = seen.decoded(p)
                decoded.append(name)
        for part, buffer in module._buffers.items():
            if buffer is not None and part not in module._non_persistent_buffers_set:
                state[f"{prefix}.{part}" if prefix else part] = buffer
    return state, decoded


# -- formats ------------------------------------------------------------------------------------------------------
def _torchao(form: WeightForm) -> _Library:
    """Tensors of torchao's own classes, taken apart by its own functions."""
    try:
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import (
            Int8Tensor,
            Int8WeightOnlyConfig,
            IntxUnpackedToInt8Tensor,
            IntxWeightOnlyConfig,
            PerGroup,
        )
        from transformers import TorchAoConfig
    except ImportError as error:
        raise ImportError('format="torchao" needs torchao: pip install "torchao>=0.18"') from error
    int4: torch.dtype = torch.int4  # type: ignore[attr-defined]
    said: dict[str, str] = {}  # of each quantized tensor
    written: set[str] = set()  # names of its parts

    def config(others: list[str]) -> Any:
        if form.group is None:
            kind: Any = Int8WeightOnlyConfig()
        else:
            kind = IntxWeightOnlyConfig(int4, PerGroup(form.group), scale_dtype=form.scale)
        return TorchAoConfig(kind, modules_to_not_convert=others)

    def write(name: str, dtype: torch.dtype, codes: Tensor, scale: Tensor) -> State:
        zero = torch.zeros_like(scale, dtype=torch.int8)
        if form.group is None:
            tensor: Any = Int8Tensor(codes, scale, [1, codes.shape[1]], dtype, zero_point=zero)
        else:
            whole = levels(codes, form.group)
            tensor = IntxUnpackedToInt8Tensor(whole, scale, zero, int4, (1, form.group), dtype, None)
        parts, about = flatten_tensor_state_dict({f"{name}.weight": tensor})
        said[f"{name}.weight"] = about[f"{name}.weight"]
        written.update(parts)
        return parts

    def describe(state: State) -> dict[str, str]:
        _, about = flatten_tensor_state_dict({name: t for name, t in state.items() if name not in written})
        return {**about, **said, "tensor_names": json.dumps([*json.loads(about["tensor_names"]), *said])}

    return _Library(config, write, describe)


def _bitsandbytes(form: WeightForm) -> _Library:
    """Layers of bitsandbytes' own class, saved by themselves. Its scales are of codes of 1/127."""
    try:
        from bitsandbytes.nn import Int8Params, Linear8bitLt
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise ImportError('format="bitsandbytes" needs bitsandbytes: pip install "bitsandbytes>=0.50"') from error

    def config(others: list[str]) -> Any:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=others)

    def write(name: str, dtype: torch.dtype, codes: Tensor, scale: Tensor) -> State:
        layer = Linear8bitLt(codes.shape[1], codes.shape[0], bias=False, has_fp16_weights=False, device="meta")
        layer.weight = Int8Params(codes, requires_grad=False, has_fp16_weights=False, SCB=scale.view(-1) * 127)
        return dict(layer.state_dict(prefix=f"{name}."))

    return _Library(config, write, lambda state: {})


_LIBRARIES = {"torchao": _torchao, "bitsandbytes": _bitsandbytes}
