"""The door to the compiled core: finds it, picks an instruction set, checks the buffers, spreads the work over threads.

The core (``csrc/hf_lowmem.h``) is a plain shared library beside this file. Where it is missing, everything still works
on the torch engine of ``kernels.adam``, with one warning.

Environment:
    HF_LOWMEM_ISA: one of ``isas()``, to force an instruction set or (``torch``) the torch engine.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .. import codec
from .adam import AdamConstants, AdamTensor
from .adam import adam_step as torch_adam_step

ABI_VERSION = 9
UNIT = 256  # values of a unit of work (HLM_UNIT)
SMALLEST_PIECE = 1 << 16  # values for which waking another thread pays
LOOKED_AT = 1 << 22  # values that all_finite hands a thread at a time
PIECES_PER_THREAD = 16  # for threads of unequal speed to end together: a tenth more than with 4 on 16 hyper-threads

TORCH = "torch"
_ISAS = ("base", "avx2", "avx512", "neon")  # by their numbers in the library; the last supported one is the best
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NONE = 255
# hlm_adam_tensor, whose fields leave no gaps: 8 pointers; n, start, key; 8 constants; the limit; 3 dtypes and the bits.
RECORD = struct.Struct("=8QqqQ8fI4B")


# -- the library --------------------------------------------------------------------------------------------------
@cache
def _library() -> ctypes.CDLL | None:
    """The compiled core, or None where this installation has none that fits."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    path = Path(__file__).with_name("_core" + suffix)
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    library.hlm_abi_version.restype = ctypes.c_int32
    library.hlm_abi_version.argtypes = []
    version = library.hlm_abi_version()
    if version != ABI_VERSION:
        raise ImportError(
            f"{path} has ABI version {version}, this hf_lowmem needs {ABI_VERSION}: it is left over from another "
            f"version. Reinstall hf_lowmem (pip install --force-reinstall --no-deps hf_lowmem)."
        )
    library.hlm_isa_supported.restype = ctypes.c_int32
    library.hlm_isa_supported.argtypes = [ctypes.c_int32]
    shared = library.hlm_adam_shared
    shared.restype = ctypes.c_int64
    shared.argtypes = [ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.POINTER(ctypes.c_int64)]
    step = library.hlm_adam_codes_shared
    step.restype = ctypes.c_int64
    step.argtypes = [ctypes.c_int32, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p]
    step.argtypes = [*step.argtypes, ctypes.POINTER(ctypes.c_int64)]
    library.hlm_any_over.restype = ctypes.c_int32
    library.hlm_any_over.argtypes = [*[ctypes.c_int32] * 2, ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32]
    shared = library.hlm_weights_shared
    shared.restype = ctypes.c_int32
    shared.argtypes = [*[ctypes.c_int32] * 2, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.POINTER(ctypes.c_int64)]
    library.hlm_triad.restype = None
    library.hlm_triad.argtypes = [ctypes.c_int32, *[ctypes.c_void_p] * 3, ctypes.c_float, ctypes.c_int64]
    return library


def available() -> bool:
    """Whether the compiled core is there."""
    return _library() is not None


@cache
def isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, the best one first; ``torch`` is always the last."""
    library = _library()
    if library is None:
        return (TORCH,)
    supported = [name for number, name in enumerate(_ISAS) if library.hlm_isa_supported(number)]
    return (*reversed(supported), TORCH)


def isa() -> str:
    """The instruction set in use: the best one, or what HF_LOWMEM_ISA says, in upper or lower case.

    Raises:
        ValueError: HF_LOWMEM_ISA names none of ``isas()``.
    """
    forced = os.environ.get("HF_LOWMEM_ISA")
    if not forced:
        return isas()[0]
    if forced.lower() not in isas():
        raise ValueError(f"HF_LOWMEM_ISA={forced!r}: this machine and build have {', '.join(isas())}")
    return forced.lower()


def core() -> tuple[ctypes.CDLL, int] | None:
    """The library, and the number in it of the instruction set in use; None: the torch engine is."""
    name, library = isa(), _library()
    return None if library is None or name == TORCH else (library, _ISAS.index(name))


# -- threads ------------------------------------------------------------------------------------------------------
@cache
def physical_cores() -> int:
    """Physical cores that this process may use: its affinity and its container's quota count, hyper-threads do not."""
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
        cores = len({_siblings(cpu) for cpu in cpus})
        return max(1, min(cores, _cgroup_cpus()))
    logical = os.cpu_count() or 1
    if sys.platform == "darwin":
        count, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        libc = ctypes.CDLL(None)
        if libc.sysctlbyname(b"hw.physicalcpu", ctypes.byref(count), ctypes.byref(size), None, 0) == 0:
            return max(1, count.value)
        return logical
    return max(1, logical // 2)  # Windows: most machines have two threads a core


def _siblings(cpu: int) -> str:
    """A name for the core that a logical CPU is a thread of."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_cpus() -> int:
    """CPUs that the container's quota amounts to, rounded up; very many where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return sys.maxsize if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return sys.maxsize


def default_threads() -> int:
    """All physical cores but one, which is left to Python and the GPU's driver; OMP_NUM_THREADS has no say."""
    return max(1, physical_cores() - 1)


def checked(threads: int | None) -> int:
    """``default_threads()`` if None.

    Raises:
        ValueError: there are less than 1.
    """
    if threads is None:
        return default_threads()
    if threads < 1:
        raise ValueError(f"threads={threads}: at least 1 is needed")
    return threads


class _Pool:
    """Threads that live as long as the process, made when they are first wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0

    def run(
        self,
        work: Callable[[object], int],
        held: object,
        stop: Callable[[], None],
        threads: int,
        ending: Callable[[], object] | None = None,
    ) -> int:
        """Runs ``work(held)`` in ``threads`` threads at once, the calling one among them, and sums what they return.

        However it is left, by an exception (Ctrl-C, say) too, no thread is at work any more.

        Args:
            held: what ``work`` reads and writes by address: it lives as long as a thread is at work.
            stop: called when one of them raises, or the calling thread is interrupted: makes ``work`` end early.
            ending: called when the first of them has nothing left to do. The calling thread is none of them then.
        """
        others: list[Future[int]] = []
        mine = int(ending is None)
        try:
            with self._lock:
                if self._executor is None or self._size < threads - mine:
                    if self._executor is not None:
                        self._executor.shutdown(wait=False)  # what it still runs is finished
                    self._size = threads - mine
                    self._executor = ThreadPoolExecutor(self._size, thread_name_prefix="hf_lowmem")
                # one by one, so that an interruption finds those that have been submitted
                others.extend(self._executor.submit(work, held) for _ in range(threads - mine))
            total = work(held) if ending is None else 0
            if ending is not None:
                wait(others, return_when=FIRST_COMPLETED)
                ending()
            return total + sum(other.result() for other in others)
        except BaseException:
            stop()
            raise
        finally:
            _wait_for(others)

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]


def _wait_for(futures: list[Future[int]]) -> None:
    """Waits until all are done, however often Ctrl-C is pressed meanwhile."""
    try:
        wait(futures)
    finally:
        if not all(future.done() for future in futures):
            _wait_for(futures)


pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.forget)  # threads do not survive a fork


# -- one step -----------------------------------------------------------------------------------------------------
def adam_step(
    tensors: Sequence[AdamTensor], threads: int | None = None, ending: Callable[[], object] | None = None
) -> int:
    """Does one AdamW step of every tensor; equals ``kernels.adam.adam_step`` bit for bit.

    Args:
        tensors: what to step, all on the CPU. No two of their written buffers may overlap.
        threads: how many threads share the work; ``default_threads()`` if None. The result does not depend on it.
        ending: called when the first thread has nothing left to do, so that another step may begin there meanwhile. The
            calling thread only waits then.

    Returns:
        Number of blocks left as they were because a gradient in them was not finite or too large.

    Raises:
        ValueError: a buffer is missing, or has the wrong device, type, length or strides. Nothing has been written.
    """
    threads = checked(threads)
    records = bytearray(RECORD.size * len(tensors))
    units = 0
    for i, tensor in enumerate(tensors):
        n = fill(records, i, tensor)
        units += -(-n // UNIT)
    found = core()
    if found is None:
        if _library() is None and not os.environ.get("HF_LOWMEM_ISA"):
            _warn_once()
        return torch_adam_step(tensors)
    return _run(*found, records, tensors, units, threads, ending)


def _run(
    library: ctypes.CDLL,
    number: int,
    records: bytearray,
    tensors: Sequence[AdamTensor],
    units: int,
    threads: int,
    ending: Callable[[], object] | None,
) -> int:
    address, count = ctypes.addressof(ctypes.c_char.from_buffer(records)) if records else 0, len(tensors)
    piece = max(-(-units // (threads * PIECES_PER_THREAD)), SMALLEST_PIECE // UNIT)
    taken = ctypes.c_int64(0)  # in the core, so that a thread needs Python's lock once a step and not once a piece

    def stop() -> None:
        taken.value = units

    def work(held: object) -> int:
        skipped = library.hlm_adam_shared(number, address, count, piece, units, ctypes.byref(taken))
        if skipped < 0:
            raise RuntimeError("the compiled core refuses a tensor that was checked: reinstall hf_lowmem")
        return skipped

    threads, held = max(1, min(threads, -(-units // piece))), (records, list(tensors))
    return work(held) if threads == 1 and ending is None else pool.run(work, held, stop, threads, ending)


def _spread(function: Callable[[int, int], int], count: int, piece: int, threads: int, held: object) -> int:
    """Sums ``function(first, last)`` over 0 .. count in pieces, each thread taking the next one when it is free.

    ``held`` is what the function reads and writes by address. If a piece raises, no further one is started.
    """
    starts = iter(range(0, count, piece))
    lock = threading.Lock()

    def stop() -> None:
        with lock:
            for _ in starts:
                pass

    def work(held: object) -> int:
        total = 0
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return total
            total += function(start, min(start + piece, count))

    threads = min(threads, -(-count // piece))
    return pool.run(work, held, stop, threads) if threads > 1 else work(held)


def all_finite(tensors: Sequence[Tensor], threads: int | None = None) -> bool:
    """Whether no value is NaN or infinite; every value is read once, at the memory's speed.

    Args:
        tensors: contiguous float32, bfloat16 or float16 tensors on the CPU, of any shape.
        threads: how many threads share the work; ``default_threads()`` if None.

    Raises:
        ValueError: a tensor has the wrong device, type or strides.
    """
    found = core()
    if found is None:
        return all(bool(x.isfinite().all()) for x in tensors)
    pieces = []
    for i, x in enumerate(tensors):
        if x.dtype not in DTYPES:
            raise ValueError(f"tensor {i} is {x.dtype}; float32, bfloat16 and float16 are taken")
        address, n = address_of(i, "values", x, x.dtype, x.numel()), x.numel()
        limit = torch.tensor(torch.finfo(x.dtype).max, dtype=x.dtype)
        bits = int(limit.view(torch.int32 if x.dtype is torch.float32 else torch.int16))
        for start in range(0, n, LOOKED_AT):
            count = min(LOOKED_AT, n - start)
            pieces.append((DTYPES[x.dtype], address + start * x.element_size(), count, bits))
    library, number = found

    def look(first: int, last: int) -> int:
        return sum(library.hlm_any_over(number, *piece) for piece in pieces[first:last])

    return not _spread(look, len(pieces), 1, default_threads() if threads is None else threads, list(tensors))


def triad(a: Tensor, b: Tensor, c: Tensor, s: float, threads: int | None = None) -> None:
    """``a = b + s * c`` with streaming stores, to measure a machine's memory: 12 bytes are moved a value.

    Args:
        a, b, c: ``float32[n]``, contiguous, on the CPU; ``a`` is written.
        threads: ``default_threads()`` if None.

    Raises:
        ValueError: a buffer has the wrong device, type, length or strides.
        RuntimeError: the compiled core is missing.
    """
    found, n = core(), a.numel()
    if found is None:
        raise RuntimeError("the triad needs the compiled core; `hf-lowmem doctor` says why there is none")
    library, number = found
    addresses = [address_of(0, name, x, torch.float32, n) for name, x in (("a", a), ("b", b), ("c", c))]
    threads = default_threads() if threads is None else threads

    def part(first: int, last: int) -> int:
        library.hlm_triad(number, *[address + 4 * first for address in addresses], s, last - first)
        return 0

    _spread(part, n, max(-(-n // threads), 1), threads, (a, b, c))


@cache
def _warn_once() -> None:
    warnings.warn(
        "hf_lowmem has no compiled core here, so optimizer steps run on plain torch, which is about a hundred times "
        "slower on a CPU core. Install a wheel for this platform, or install a C++ compiler and reinstall "
        "(pip install --force-reinstall --no-deps --no-binary hf_lowmem hf_lowmem). HF_LOWMEM_ISA=torch chooses the "
        "torch engine without this warning.",
        RuntimeWarning,
        stacklevel=3,
    )


# -- buffers ------------------------------------------------------------------------------------------------------
def fill(records: bytearray, index: int, t: AdamTensor) -> int:
    """Checks a tensor's buffers, writes its record and returns its number of values.

    A weight of codes, ``int8``, counts as the fp32 values that they will be decoded to.
    """
    n = t.weight.numel()
    weight_dtype, grad_dtype = t.weight.dtype, t.grad.dtype
    if weight_dtype is torch.int8:
        weight_dtype = torch.float32
    if weight_dtype not in DTYPES or grad_dtype not in DTYPES:
        name, dtype = ("grad", grad_dtype) if weight_dtype in DTYPES else ("weight", weight_dtype)
        raise ValueError(f"tensor {index}: {name} is {dtype}; float32, bfloat16 and float16 are supported")
    state = codec.STATES.get(t.bits)
    if state is None and t.bits != 32:
        raise ValueError(f"tensor {index}: bits={t.bits}; 4, 8 and 32 are supported")
    if t.start < 0 or t.start % UNIT:
        raise ValueError(f"tensor {index}: start={t.start}; it has to be a multiple of {UNIT}")
    if t.extension is not None and weight_dtype is torch.float32:
        raise ValueError(f"tensor {index}: extension belongs to a bfloat16 or float16 weight, not to a float32 one")
    copy_dtype = _NONE
    if t.copy is not None:
        copy_dtype = DTYPES.get(t.copy.dtype, _NONE)
        if weight_dtype is not torch.float32 or copy_dtype not in (1, 2):
            raise ValueError(
                f"tensor {index}: copy is {t.copy.dtype} of a {weight_dtype} weight; it may be a bfloat16 or float16 "
                f"copy of a float32 weight"
            )
    if state is None:
        codes, codes_dtype = n, torch.float32
        m_scale = v_scale = 0
    else:
        codes, codes_dtype, blocks = state.nbytes(n), torch.uint8, state.blocks(n)
        m_scale = address_of(index, "m_scale", t.m_scale, torch.float32, blocks)
        v_scale = address_of(index, "v_scale", t.v_scale, torch.float32, blocks)
    k = t.constants
    RECORD.pack_into(
        records,
        index * RECORD.size,
        address_of(index, "weight", t.weight, t.weight.dtype, n),
        0 if t.extension is None else address_of(index, "extension", t.extension, torch.int8, n),
        0 if t.copy is None else address_of(index, "copy", t.copy, t.copy.dtype, n),
        address_of(index, "grad", t.grad, grad_dtype, n),
        address_of(index, "m", t.m, codes_dtype, codes),
        address_of(index, "v", t.v, codes_dtype, codes),
        m_scale,
        v_scale,
        n,
        t.start,
        t.key,
        k.c_m,
        k.b_m,
        k.c_h,
        k.b_v,
        k.root_correction,
        k.eps,
        k.step_size,
        k.decay,
        _grad_limit(k, grad_dtype),
        DTYPES[weight_dtype],
        copy_dtype,
        DTYPES[grad_dtype],
        t.bits,
    )
    return n


@lru_cache(maxsize=256)
def _grad_limit(constants: AdamConstants, dtype: torch.dtype) -> int:
    return constants.grad_limit(dtype)


def address_of(index: int, name: str, x: Tensor | None, dtype: torch.dtype, length: int) -> int:
    """Where the buffer lies, once it is known to be what the core takes it for."""
    if x is not None and x.dtype is dtype and x.numel() == length and x.is_cpu and x.is_contiguous():
        return x.data_ptr()
    wanted = f"a contiguous CPU tensor of {length} {dtype} values is needed"
    if x is None:
        raise ValueError(f"tensor {index}: {name} is missing; {wanted}")
    if not x.is_contiguous():
        wanted += f" (its strides are {tuple(x.stride())})"
    raise ValueError(f"tensor {index}: {name} has {x.numel()} values of {x.dtype} on {x.device}; {wanted}")
