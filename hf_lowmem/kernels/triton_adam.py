"""The AdamW step of parameters that stay on a GPU, in Triton: the bits of ``kernels.adam``, its oracle.

The kernel is ``triton_kernel``'s. Adapters have hundreds of small tensors, and to launch it for each costs the CPU many
times what the GPU needs for it. So tensors that are alike are stepped by one launch, which a table in the GPU's memory
tells what is where: it has a row for each tensor. A program finds its row in a list that depends on nothing but the
tensors' sizes, and stays on the GPU.
"""

from __future__ import annotations

import array
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import codec
from .adam import AdamConstants, AdamTensor
from .triton_kernel import adam_kernel, signed

TILE = 1024  # values that a program steps at once
LEAST = 4  # tensors that are worth a table
# Of its rows: seven addresses, number of values, first tile less first program, first block, the key's halves.
COLUMNS = tl.constexpr(12)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_constants = operator.attrgetter("c_m", "b_m", "c_h", "b_v", "root_correction", "eps", "step_size", "decay")
_compiled: dict[tuple[Any, ...], Any] = {}


def adam_step(tensors: Sequence[AdamTensor]) -> Tensor:
    """Does one AdamW step of every tensor; equals ``kernels.adam.adam_step`` bit for bit.

    Args:
        tensors: what to step, all on one CUDA device and each once, with the same constraints as there. ``copy`` must
            be None.

    Returns:
        Number of blocks left as they were because a gradient in them was not finite or too large, ``int32[]`` on the
        device: nobody waits for it.

    Raises:
        ValueError: a tensor has a ``copy``.
    """
    device = tensors[0].weight.device if tensors else torch.device("cpu")
    skipped = torch.zeros((), dtype=torch.int32, device=device)
    alike: dict[tuple[Any, ...], list[_Launch]] = {}
    for t in tensors:
        launch = _launch_of(t, skipped)
        fits = launch.n < 2**31 and launch.aligned
        alike.setdefault((launch.types, launch.constants, fits), []).append(launch)
    for (*_, fits), launches in alike.items():
        if fits and len(launches) >= LEAST:
            _launch_together([x for x in launches if x.n >= TILE], skipped, whole=True)
            _launch_together([x for x in launches if x.n % TILE], skipped, whole=False)
            continue
        for launch in launches:
            launch.run()
    return skipped


class _Launch(NamedTuple):
    """What a launch of the kernel needs for a tensor of ``n`` values: its buffers, where they are and whether that is
    where Triton compiles the same kernel for most, its first block and key, what else it has in common with tensors of
    its group, and its types.
    """

    n: int
    tensors: list[Tensor]
    pointers: list[int]
    aligned: bool
    numbers: tuple[int, int, int]
    constants: tuple[Any, ...]
    types: tuple[Any, ...]

    def run(self) -> None:
        """Steps the tensor."""
        whole, rest = divmod(self.n, TILE)
        if whole:
            self._run(whole, 0, True)
        if rest:
            self._run(1, whole, False)

    def _run(self, tiles: int, first: int, whole: bool) -> None:
        """Launches the kernel, past most of what Triton does for that once it is compiled."""
        types, numbers = (*self.types, whole), (self.n, first, *self.numbers, *self.constants)
        key = self.tensors[0].device, types, self.n < 2**31
        kernel = _compiled.get(key) if self.aligned else None
        if kernel is None:
            tensors = [codec.bits_of(x) if i in (0, 2) else x for i, x in enumerate(self.tensors)]
            kernel = adam_kernel[tiles, 1, 1](*tensors, *numbers, *types, num_warps=1, enable_fp_fusion=False)
            if kernel is not None and self.aligned:  # the interpreter has none
                _compiled[key] = kernel
        else:
            kernel[tiles, 1, 1](*self.pointers, *numbers, *types)


def _launch_of(t: AdamTensor, skipped: Tensor) -> _Launch:
    """See ``adam_step``, which counts blocks in ``skipped``. Raises: ValueError as there."""
    if t.copy is not None:
        raise ValueError("a parameter on the device is stepped where it is: it has no 16-bit copy")
    form = codec.STATES.get(t.bits)
    block = form.block if form else codec.BLOCK32
    used = t.weight, t.extension, t.grad, t.m, t.v, t.m_scale, t.v_scale, skipped
    tensors = [skipped if x is None else x for x in used]  # what a kernel of these types does not touch is anything
    types = KINDS[t.weight.dtype], KINDS[t.grad.dtype], t.extension is not None, t.bits, block, TILE // block
    pointers = [x.data_ptr() for x in tensors]
    return _Launch(
        t.weight.numel(),
        tensors,
        pointers,
        functools.reduce(operator.or_, pointers) % 16 == 0,
        (t.start // block, signed(t.key), signed(t.key >> 32)),
        _shared(t.constants, t.grad.dtype),
        types,
    )


@functools.lru_cache(maxsize=256)
def _shared(constants: AdamConstants, dtype: torch.dtype) -> tuple[Any, ...]:
    return _grad_limit(constants, dtype), *_constants(constants)


def _grad_limit(constants: AdamConstants, dtype: torch.dtype) -> int:
    """``constants.grad_limit`` as the bits of an fp32."""
    limit = constants.grad_limit(dtype)
    word = torch.tensor(limit, dtype=torch.int32 if dtype is torch.float32 else torch.int16)
    return int(word.view(dtype).float().view(torch.int32))


def _launch_together(launches: list[_Launch], skipped: Tensor, whole: bool) -> None:
    """Launches the kernel once for the whole tiles of tensors that are alike, or for the rest behind them."""
    if not launches:
        return
    tiles = tuple(x.n // TILE for x in launches) if whole else (1,) * len(launches)
    row_of, first = _rows(tiles, skipped.device)
    table = array.array("q")
    for x, before in zip(launches, first, strict=True):
        tile = -before if whole else x.n // TILE - before
        table.extend((*x.pointers[:-1], x.n, tile, *x.numbers))
    there = torch.frombuffer(table, dtype=torch.int64)
    if skipped.is_cuda:  # from memory that the copy may still read when this has returned
        there = there.pin_memory().to(skipped.device, non_blocking=True)
    types = (*launches[0].types, whole)
    arguments = there, row_of, skipped
    grid, key = (len(row_of), 1, 1), (skipped.device, types)
    kernel = _compiled.get(key)
    if kernel is None:
        kernel = _steps[grid](*arguments, *launches[0].constants, *types, num_warps=1, enable_fp_fusion=False)
        if kernel is not None:  # the interpreter has none
            _compiled[key] = kernel
    else:
        kernel[grid](*(x.data_ptr() for x in arguments), *launches[0].constants, *types)


@functools.lru_cache(maxsize=64)
def _rows(tiles: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int]]:
    """The number of the tensor of each program, ``int32[sum of tiles]``, and the first program of each tensor."""
    counts = torch.tensor(tiles)
    rows = torch.repeat_interleave(torch.arange(len(tiles), dtype=torch.int32), counts)
    return rows.to(device), (counts.cumsum(0) - counts).tolist()


@triton.jit
def _pointer(row, COLUMN: tl.constexpr, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(row + COLUMN).to(tl.pointer_type(TYPE)), 16)


@triton.jit(do_not_specialize=["grad_limit"])
def _steps(
    table_ptr,
    rows_ptr,
    skipped_ptr,
    grad_limit,
    c_m,
    b_m,
    c_h,
    b_v,
    correction,
    eps,
    step_size,
    decay,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    EXTENDED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    WORD: tl.constexpr = tl.int32 if WEIGHT == 0 else tl.int16
    GRAD_WORD: tl.constexpr = tl.int32 if GRAD == 0 else tl.int16
    MOMENT: tl.constexpr = tl.float32 if BITS == 32 else tl.uint8
    row = table_ptr + tl.load(rows_ptr + tl.program_id(0)).to(tl.int64) * COLUMNS
    adam_kernel(
        _pointer(row, 0, WORD),
        _pointer(row, 1, tl.int8),
        _pointer(row, 2, GRAD_WORD),
        _pointer(row, 3, MOMENT),
        _pointer(row, 4, MOMENT),
        _pointer(row, 5, tl.float32),
        _pointer(row, 6, tl.float32),
        skipped_ptr,
        tl.load(row + 7).to(tl.int32),
        tl.load(row + 8).to(tl.int32),
        tl.load(row + 9).to(tl.int32),
        tl.load(row + 10).to(tl.int32),
        tl.load(row + 11).to(tl.int32),
        grad_limit,
        c_m,
        b_m,
        c_h,
        b_v,
        correction,
        eps,
        step_size,
        decay,
        WEIGHT,
        GRAD,
        EXTENDED,
        BITS,
        BLOCK,
        ROWS,
        WHOLE,
    )
