"""``load``: a checkpoint straight into the place where its blocks rest.

``from_pretrained`` maps a file whose dtype is the wanted one without copying it. But where it casts or merges tensors
(the experts of a mixture), threads run ahead with copies, and malloc keeps what they free: with many small experts that
is the model a second time. It reads one tensor after another only for a quantizer. So we are one here, for as long as
it takes, through transformers' public registry: its "quantization" of a tensor, which arrives renamed, merged and cast,
is to put it in its place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .attachment import blocks_of, check_room, device_or_default, hang, share_of, shelf_of, widen_gradients
from .block import Block
from .coded import put_at_home, restore
from .config import LowMemConfig
from .layer import Layer
from .memory import trim
from .shelf import RamShelf

METHOD = "hf_lowmem"  # our name among the quantizers
TRIM = 16 * 2**20  # after so many bytes of tensors, what malloc keeps of their copies goes back to the system


def load(
    name_or_path: str | os.PathLike[str],
    config: LowMemConfig,
    device: torch.device | str | None = None,
    *,
    model_class: Any = None,
    model_config: PreTrainedConfig | str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a checkpoint and leaves the model as ``attach(model, config, device)`` does.

    The streamed blocks' tensors go to where they rest one by one, the others to the device. The peak of RAM, above what
    rests there, is about one tensor, also where it is cast; where the checkpoint has the experts of a mixture one by
    one, twice the largest merged tensor, and once more where they are cast.

    Args:
        name_or_path: a folder, or a model's name on the hub, as ``from_pretrained`` takes it.
        config: as for ``attach``. With ``offload="none"`` this is ``from_pretrained`` to the device.
        device: as for ``attach``.
        model_class: whose ``from_pretrained`` is called, a model's or one of the ``AutoModel`` classes. None:
            ``AutoModelForCausalLM``.
        model_config: the ``config`` of ``from_pretrained``.
        **kwargs: further arguments of ``from_pretrained``, such as ``dtype`` or ``attn_implementation``. Missing,
            unexpected and mismatched keys are treated, and reported, as it does.

    Returns:
        The model; with ``output_loading_info=True``, the model and the information, as ``from_pretrained`` returns it.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: ``from_pretrained`` found no such model, or not all of its files.
        RuntimeError: tensors of the checkpoint have other shapes than the model's, and not
            ``ignore_mismatched_sizes=True``.
        ValueError: the checkpoint is quantized, or corrupt; the model has no blocks that could be streamed; an argument
            that says where the model is to be, or how it is quantized.
        DoesNotFit: the weights are more than the budgets, or the machine, have room for.
    """
    device = device_or_default(device)
    if model_config is not None:
        kwargs["config"] = model_config
    streamed = share_of(config, device) > 0 or config.weights != "model"
    _check_arguments(name_or_path, kwargs, streamed=streamed)
    if streamed:
        _check_unquantized(name_or_path, kwargs)
    filling = Filling(config, device)
    if streamed:
        kwargs["quantization_config"] = filling
    elif device.type != "cpu":
        kwargs["device_map"] = {"": device}
    try:
        loaded = (model_class or AutoModelForCausalLM).from_pretrained(name_or_path, **kwargs)
    except SafetensorError as error:
        file = _corrupt_file(name_or_path)
        raise ValueError(
            f"{file or name_or_path} is corrupt or incomplete ({error}): copy or download it anew"
        ) from error
    except _Failed as failed:
        raise failed.error from None
    if streamed:
        model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
        filling.check_shapes(model, bool(kwargs.get("ignore_mismatched_sizes")), info)
        filling.finish(model)
    return loaded


# -- filling the slabs --------------------------------------------------------------------------------------------
class Filling(QuantizationConfigMixin):
    """One load: where its tensors go. To transformers it is the configuration of a quantization.

    Args:
        config: ``offload``, ``weights`` and ``debug`` are read.
        device: of what is not streamed.
    """

    def __init__(self, config: LowMemConfig, device: torch.device) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.config, self.device = config, device
        self.dtype: torch.dtype | None = None  # which the model is loaded in
        self._expected: dict[str, Tensor] = {}  # by name, without memory
        self._blocks: list[Block] = []
        self._shelf: RamShelf | None = None
        self._places: dict[str, tuple[int, int]] = {}  # by name: the block's number, and which of its tensors it is
        self._misfits: dict[str, torch.Size] = {}
        self._freed = 0  # bytes of tensors that have been put in their places since the last trim()

    def __deepcopy__(self, memo: Any) -> Filling:
        return self  # transformers copies configurations; there is one load

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method}

    def begin(self, model: nn.Module) -> None:
        """Lays out the slabs of a model on the meta device."""
        widen_gradients(model, self.config, self.device)
        self._blocks = blocks_of(model, self.config, self.device)
        check_room(model, self._blocks, self.config, self.device)
        self._shelf = shelf_of(self._blocks, self.device)
        self._expected = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        # Parameters that are to be one soon are not a block's own. from_pretrained compares them: on one device.
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
        for number, block in enumerate(self._blocks):
            block.number = number
            for i, (name, _) in enumerate(block.params):
                whole = f"{block.name}.{name}"
                if whole not in tied and whole not in tied.values():
                    self._places[whole] = (number, i)

    def takes(self, name: str) -> bool:
        """Whether this tensor goes through ``put``: not those of a dtype other than the model's, which transformers
        would cast to the model's first.
        """
        return name in self._expected and self._expected[name].dtype == self.dtype

    def put(self, name: str, value: Tensor) -> Tensor | None:
        """The tensor in its slab, or on the device. None where the shape is wrong: it then counts as missing."""
        expected = self._expected.get(name)
        if expected is None:
            return value
        if value.shape != expected.shape:
            self._misfits[name] = value.shape
            return None
        number, i = self._places.get(name, (-1, -1))
        if number < 0:
            return value.to(self.device)
        if value.dtype != expected.dtype:
            return value
        assert self._shelf is not None
        home = put_at_home(self._blocks[number], i, value, self._shelf)
        self._freed += value.nbytes
        if self._freed >= TRIM:
            self._freed = 0
            trim()
        return home

    def check_shapes(self, model: nn.Module, ignore: bool, info: dict[str, Any]) -> None:
        """What from_pretrained does for mismatched keys, but not for a quantizer, whose tensors may have any shape."""
        for name, value in model.state_dict().items():
            expected = self._expected.get(name)
            if expected is not None and value.shape != expected.shape:  # one that we have not taken
                self._misfits[name], ignore = value.shape, False
        if not self._misfits:
            return
        found = {(name, shape, self._expected[name].shape) for name, shape in self._misfits.items()}
        listed = "; ".join(
            f"{name} is {list(one)} in the checkpoint, {list(other)} in the model" for name, one, other in sorted(found)
        )
        if not ignore:
            raise RuntimeError(
                f"tensors of another shape than {type(model).__name__}'s: {listed}. Load another checkpoint or another "
                "configuration of the model, or write ignore_mismatched_sizes=True to have them initialised anew"
            )
        logging.get_logger(__name__).warning(f"initialised anew, for want of a tensor that fits: {listed}")
        if info:
            info["missing_keys"] -= self._misfits.keys()
            info["mismatched_keys"] |= found

    def finish(self, model: nn.Module) -> None:
        """Attaches the model, whose parameters may be others than expected: tied, in another dtype, or with adapters.

        Then all blocks move to slabs that fit, one after another.
        """
        widen_gradients(model, self.config, self.device)  # its parameters may be others now
        blocks = blocks_of(model, self.config, self.device)
        fits = [_places_in(b) for b in blocks] == [_places_in(b) for b in self._blocks]
        shelf = self._shelf if fits else None
        if not fits and self._shelf is not None:
            for block in self._blocks:
                restore(block, model.get_submodule(block.name), self._shelf)
        self._blocks, self._shelf = [], None
        hang(model, blocks, self.config, self.device, shelf)
        trim()


def _places_in(block: Block) -> list[list[tuple[Any, ...]]]:
    """What two blocks have in common that fit in one slab, and their gradients too."""

    def places(layer: Layer | None) -> list[tuple[Any, ...]]:
        return [] if layer is None else [(s.shape, s.dtype, s.offset) for s in layer.specs]

    return [places(block.layer), places(block.coded_layer), places(block.gradient_layer)]


class _Failed(BaseException):
    """Takes an error past transformers, which would collect it and go on with the next tensor."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Put(ConversionOps):
    def __init__(self, filling: Filling) -> None:
        self.filling = filling

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            put: dict[str, Any] = {}
            for name in list(input_dict):
                value = input_dict.pop(name)  # so that it is gone before the next one is put
                place = self.filling.put(name, value[0] if isinstance(value, list) else value)
                if place is not None:
                    put[name] = place
            return put
        except Exception as error:
            raise _Failed(error) from error


class _Quantizer(HfQuantizer):
    requires_calibration = False
    quantization_config: Filling

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.quantization_config.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.quantization_config.begin(model)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.quantization_config.takes(param_name)

    def get_quantize_ops(self) -> _Put:
        return _Put(self.quantization_config)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Nobody is to see that there was a quantizer."""
        conversions = getattr(model, "_weight_conversions", None)
        self.remove_quantization_config(model)
        if conversions is not None:
            model._weight_conversions = conversions  # by which save_pretrained finds the checkpoint's own names
        model.__dict__.pop("is_quantized", None)
        for config in _configs(model):
            for name in ("quantization_config", "_is_quantized"):
                config.__dict__.pop(name, None)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


with contextlib.suppress(ValueError):  # the module is imported a second time
    register_quantizer(METHOD)(_Quantizer)


def _configs(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """A model's configurations: its own, those within it, and the copies that its parts have made."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            pending = [module.config]
            while pending:
                config = pending.pop()
                yield config
                pending += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]


# -- what is refused ----------------------------------------------------------------------------------------------
PLACED = ("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "distributed_config")
QUANTIZED = ("quantization_config", "load_in_4bit", "load_in_8bit", "gguf_file")


def _check_arguments(name_or_path: str | os.PathLike[str], kwargs: Mapping[str, Any], streamed: bool) -> None:
    given = [name for name in PLACED if kwargs.get(name) is not None]
    if given:
        raise ValueError(
            f"load() says itself where the model goes, and was given {given[0]}: leave it out, and write device= and "
            "LowMemConfig(offload=...)"
        )
    given = [name for name in QUANTIZED if kwargs.get(name)] if streamed else []
    if given:
        raise ValueError(
            f"blocks that are streamed are not quantized, and load() was given {given[0]}: leave it out, or write "
            'LowMemConfig(offload="none")'
        )
    path = str(name_or_path)
    if (path.startswith((".", "~")) or os.path.isabs(path) or path.count("/") > 1) and not os.path.isdir(path):
        raise FileNotFoundError(f"there is no folder {path!r} to load a model from")


def _check_unquantized(name_or_path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> None:
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        settings = config.to_dict()
    else:
        try:
            settings, _ = PreTrainedConfig.get_config_dict(config or name_or_path, **kwargs)
        except OSError:
            return  # a folder of adapters, or nothing at all: from_pretrained finds out
    for part in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        found = part.get("quantization_config")
        if found is not None:
            method = found.get("quant_method", "unknown") if isinstance(found, dict) else found.quant_method
            raise ValueError(
                f"{name_or_path} is quantized (quantization_config with quant_method={str(method)!r} in its "
                "config.json), and such blocks cannot be streamed: load the unquantized checkpoint; or make one with "
                'from_pretrained, dequantize() and save_pretrained; or write LowMemConfig(offload="none")'
            )


def _corrupt_file(name_or_path: str | os.PathLike[str]) -> Path | None:
    files = sorted(Path(name_or_path).glob("**/*.safetensors"))
    return next((file for file in files if not _opens(file)), None)


def _opens(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt"):
            return True
    except SafetensorError:
        return False
