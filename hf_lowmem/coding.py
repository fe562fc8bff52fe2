"""Weights in few bits, wherever they are: by the C++ core in RAM, by Triton on a GPU, by plain torch elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .engines import proven
from .kernels import native_weights, weights
from .kernels.weights import FORMS, WeightForm, empty

Encoding = tuple[Tensor, WeightForm, Tensor, Tensor]  # a weight, how it is written, and where codes and scales go
Recoding = tuple[Tensor, Tensor, Tensor, int]  # what has changed, its codes and scales, and the key of random bits
Decoding = tuple[
    Tensor, Tensor, WeightForm, Tensor
]  # codes and scales, how they are written, and where the weight goes

NO_TRITON = (
    "Triton cannot be used for weights in 8 or 4 bits ({reason}): plain torch is, which takes more time and memory "
    "of the GPU. Install triton (on Windows triton-windows) and a C compiler."
)


def encode(items: Sequence[Encoding], threads: int | None = None) -> None:
    """Writes weights, all on one device; see ``kernels.weights``.

    Args:
        threads: of the CPU, for those in RAM; None: as many as the optimizer takes.
    """
    if items and items[0][0].device.type == "cpu":
        native_weights.encode(items, threads)
        return
    engine = engine_of(items[0][0].device) if items else weights
    for item in items:
        engine.encode(*item)


def decode(items: Sequence[Decoding], threads: int | None = None) -> None:
    """Reads weights, all on one device."""
    if items and items[0][0].device.type == "cpu":
        native_weights.decode(items, threads)
        return
    engine = engine_of(items[0][0].device) if items else weights
    for item in items:
        engine.decode(*item)


def recode(items: Sequence[Recoding], threads: int | None = None) -> None:
    """Writes weights again that have been read and changed, all on one device."""
    if items and items[0][0].device.type == "cpu":
        native_weights.recode(items, threads)
        return
    engine = engine_of(items[0][0].device) if items else weights
    for item in items:
        engine.recode(*item)


@functools.cache
def engine_of(device: torch.device) -> ModuleType:
    """What writes and reads on a device that is not the CPU: Triton where its bits are right, else plain torch."""

    def load() -> ModuleType:
        from .kernels import triton_weights

        return triton_weights

    return proven(load, lambda engine: _goes_wrong(engine, device), weights, NO_TRITON)


def _goes_wrong(engine: ModuleType, device: torch.device) -> str | None:
    """What an engine writes or reads differently on a device from the reference; None if nothing."""
    x = torch.randn(37, 320, generator=torch.Generator().manual_seed(1)).bfloat16()
    for form in FORMS.values():
        found = []
        for module, place in ((engine, device), (weights, torch.device("cpu"))):
            codes, scale = empty((37, 320), form, place)
            module.encode(x.to(place), form, codes, scale)
            back = torch.empty(37, 320, dtype=torch.bfloat16, device=place)
            module.decode(codes, scale, form, back)
            found.append([one.cpu() for one in (codes, scale, back)])
        if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
            return f"it computes other bits than it should for {form.name}: please report this"
    return None
