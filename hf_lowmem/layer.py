"""``Layer``: tensors of one block that move together as one piece of memory; ``Spec``: one tensor's place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

PAGE = 4096  # a layer's bytes are whole pages: what a drive reads and writes directly
ALIGN = 256  # a tensor's first byte within its layer: what a GPU reads fastest


@dataclass(frozen=True)
class Spec:
    """One tensor's place in the bytes of its layer.

    Args:
        name: the tensor's name within its block.
        shape: its shape.
        dtype: its dtype.
        offset: of its first byte, a multiple of 256.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, slab: Tensor) -> Tensor:
        """The tensor within a layer's bytes, ``uint8[Layer.nbytes]``."""
        return slab[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def gradient_dtype(p: Tensor) -> torch.dtype:
    """The dtype that torch will give a parameter's gradient: its ``grad_dtype``, where torch knows that."""
    dtype: torch.dtype | None = getattr(p, "grad_dtype", None)
    return dtype or p.dtype


@dataclass(frozen=True)
class Layer:
    """What moves together: one contiguous slab of whole pages.

    Args:
        specs: its tensors, in the order of their offsets.
        nbytes: of the slab, a multiple of 4096.
    """

    specs: tuple[Spec, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Tensor]]) -> Layer:
        """The layer that holds these named tensors, one after another."""
        specs, end = [], 0
        for name, tensor in tensors:
            spec = Spec(name, tuple(tensor.shape), tensor.dtype, end)
            specs.append(spec)
            end += -(-spec.nbytes // ALIGN) * ALIGN
        return cls(tuple(specs), -(-end // PAGE) * PAGE)

    def views(self, slab: Tensor) -> list[Tensor]:
        """Each tensor within the layer's bytes, ``uint8[nbytes]``, on whatever device they are."""
        return [spec.view(slab) for spec in self.specs]
