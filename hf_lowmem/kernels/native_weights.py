"""Weights in 8 and 4 bits by the compiled core: many of them in one call, which wakes its threads once.

Bit for bit ``kernels.weights``, which does the work where the core is missing or HF_LOWMEM_ISA is ``torch``.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import weights
from .adam import AdamTensor
from .native import DTYPES, PIECES_PER_THREAD, RECORD, SMALLEST_PIECE, address_of, checked, core, fill, pool
from .native import UNIT as ADAM_UNIT
from .weights import INT8, WeightForm

UNIT = 1 << 14  # values of a unit of work, in whole rows (HLM_WEIGHT_UNIT)
STEPPED = 1 << 16  # values that a thread steps at a time: 256 kB, which a core's second cache holds
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


def step(tensor: AdamTensor, codes: Tensor, scale: Tensor, key: int, threads: int | None = None) -> int:
    """One AdamW step of a weight that exists in 8 bits alone: decoded, stepped in fp32, recoded, some rows at a time.

    Args:
        tensor: the step of all of it; its ``weight`` is not used.
        codes, scale: of the weight, on the CPU; changed.
        key: of the random bits with which it is recoded, ``weights.recode``'s.
        threads: see ``encode``.

    Returns: the number of blocks left as they were for their gradients; they are recoded all the same.

    Raises:
        ValueError: see ``encode``.
        RuntimeError: the core is missing.
    """
    threads, found = checked(threads), core()
    if found is None:
        raise RuntimeError("this step needs the compiled core; `hf-lowmem doctor` says why there is none")
    (library, number), (rows, columns) = found, codes.shape
    least = ADAM_UNIT // math.gcd(columns, ADAM_UNIT)
    each = max(least, STEPPED // columns // least * least)
    step, taken = bytearray(RECORD.size), ctypes.c_int64(0)
    shape = [
        address_of(0, "codes", codes, torch.int8, codes.numel()),
        address_of(0, "scale", scale, torch.float32, rows),
    ]
    fill(step, 0, replace(tensor, weight=codes.view(-1)))
    weight = bytearray(_RECORD.pack(0, *shape, rows, columns, key, DTYPES[torch.float32], 8))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(record)) for record in (step, weight)]

    def stop() -> None:
        taken.value = rows

    def work(held: object) -> int:
        wide = torch.empty(each * columns)
        skipped = library.hlm_adam_codes_shared(number, *addresses, each, wide.data_ptr(), ctypes.byref(taken))
        if skipped < 0:
            raise RuntimeError("the compiled core refuses a weight that was checked: reinstall hf_lowmem")
        return int(skipped)

    threads, held = max(1, min(threads, -(-rows // each))), (step, weight, tensor, codes, scale)
    return work(held) if threads == 1 else pool.run(work, held, stop, threads)


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
