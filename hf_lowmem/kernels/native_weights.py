"""Weights in 8 and 4 bits by the compiled core: many of them in one call, which wakes its threads once.

Bit for bit ``kernels.weights``, which does the work where the core is missing or HF_LOWMEM_ISA is ``torch``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import weights
from .native import DTYPES, PIECES_PER_THREAD, SMALLEST_PIECE, address_of, checked, core, pool
from .weights import INT8, WeightForm

UNIT = 1 << 14  # values of a unit of work, in whole rows (HLM_WEIGHT_UNIT)
_ENCODE, _DECODE, _RECODE = range(3)  # hlm_weight_action
_RECORD = struct.Struct("=3Q2qQ2B6x")  # hlm_weight: values, codes, scale; rows, columns; key; dtype, bits; its end


def encode(items: Sequence[tuple[Tensor, WeightForm, Tensor, Tensor]], threads: int | None = None) -> None:
    """Writes weights.

    Args:
        items: what ``weights.encode`` takes, all on the CPU: ``(x, form, codes, scale)``.
        threads: how many share the work; ``native.default_threads()`` if None. The result does not depend on it.

    Raises:
        ValueError: a buffer has the wrong device, type, shape or strides. Nothing has been written.
    """
    records = [_record(i, "x", x, form, codes, scale) for i, (x, form, codes, scale) in enumerate(items)]
    _run(_ENCODE, records, items, threads, weights.encode)


def decode(items: Sequence[tuple[Tensor, Tensor, WeightForm, Tensor]], threads: int | None = None) -> None:
    """Reads weights.

    Args:
        items: what ``weights.decode`` takes, all on the CPU: ``(codes, scale, form, out)``, ``out`` in fp32, bf16 or
            fp16.
        threads: see ``encode``.

    Raises: see ``encode``.
    """
    records = [_record(i, "out", out, form, codes, scale) for i, (codes, scale, form, out) in enumerate(items)]
    _run(_DECODE, records, items, threads, weights.decode)


def recode(items: Sequence[tuple[Tensor, Tensor, Tensor, int]], threads: int | None = None) -> None:
    """Writes weights of form ``int8`` again that have been read and changed.

    Args:
        items: what ``weights.recode`` takes, all on the CPU: ``(x, codes, scale, key)``.
        threads: see ``encode``.

    Raises: see ``encode``.
    """
    for i, (x, *_) in enumerate(items):
        if x.dtype is not torch.float32 or x.dim() != 2:
            raise ValueError(f"weight {i}: x is {x.dtype} of shape {tuple(x.shape)}; float32[rows, columns] is needed")
    records = [_record(i, "x", x, INT8, codes, scale, key) for i, (x, codes, scale, key) in enumerate(items)]
    _run(_RECODE, records, items, threads, weights.recode)


def _record(
    index: int, name: str, values: Tensor, form: WeightForm, codes: Tensor, scale: Tensor, key: int = 0
) -> tuple[bytes, int]:
    """Checks a weight's buffers; what the core is told of it, and its units of work."""
    shape = tuple(values.shape)
    if values.dtype not in DTYPES:
        raise ValueError(f"weight {index}: {name} is {values.dtype}; float32, bfloat16 and float16 are supported")
    if not form.takes(shape):
        raise ValueError(f"weight {index}: {name} of shape {shape} cannot be written as {form.name}")
    for part, found, wanted in zip(("codes", "scale"), (codes, scale), form.parts(shape), strict=True):
        if tuple(found.shape) != wanted:
            raise ValueError(
                f"weight {index}: {part} has shape {tuple(found.shape)}; {shape} needs {wanted} in {form.name}"
            )
    columns = form.group or shape[-1]
    rows = values.numel() // columns
    record = _RECORD.pack(
        address_of(index, name, values, values.dtype, values.numel()),
        address_of(index, "codes", codes, form.codes, codes.numel()),
        address_of(index, "scale", scale, form.scale, scale.numel()),
        rows,
        columns,
        key,
        DTYPES[values.dtype],
        form.bits,
    )
    return record, -(-rows // max(1, UNIT // columns))


def _run(
    action: int,
    records: Sequence[tuple[bytes, int]],
    items: Sequence[tuple],
    threads: int | None,
    reference: Callable[..., None],
) -> None:
    threads, found = checked(threads), core()
    if found is None:
        for item in items:
            reference(*item)
        return
    library, number = found
    together = bytearray(b"".join(record for record, _ in records))
    address = ctypes.addressof(ctypes.c_char.from_buffer(together)) if together else 0
    count, units = len(records), sum(of_it for _, of_it in records)
    piece = max(-(-units // (threads * PIECES_PER_THREAD)), SMALLEST_PIECE // UNIT)
    taken = ctypes.c_int64(0)  # in the core, so that a thread needs Python's lock once a call and not once a piece

    def stop() -> None:
        taken.value = units

    def work(held: object) -> int:
        if library.hlm_weights_shared(number, action, address, count, piece, units, ctypes.byref(taken)):
            raise RuntimeError("the compiled core refuses a weight that was checked: reinstall hf_lowmem")
        return 0

    threads, held = max(1, min(threads, -(-units // piece))), (together, list(items))
    if threads == 1:
        work(held)
    else:
        pool.run(work, held, stop, threads)
