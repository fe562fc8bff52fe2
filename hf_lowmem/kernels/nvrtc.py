"""CUDA source, compiled at run time by NVRTC and started through the driver: no CUDA toolkit is needed.

torch has a door of its own for this, ``torch.cuda._compile_kernel``. It asks for the toolkit's headers, which few
machines have, and gives no binary back for a GPU that is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

SHARED = 48 * 1024  # bytes of shared memory that a block may have without being allowed more
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


# -- compiling ----------------------------------------------------------------------------------------------------
def find_nvrtc(folders: Sequence[str] = ()) -> ctypes.CDLL:
    """NVIDIA's run-time compiler: torch's own, or one that is installed beside it.

    Args:
        folders: where to look first.

    Raises: OSError where there is none.
    """
    major = (torch.version.cuda or "").split(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    places = [Path(torch.__file__).parent / "lib"]
    spec = importlib.util.find_spec("nvidia")  # where pip puts it: nvidia/cu13/lib, nvidia/cuda_nvrtc/lib
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        places += [folder for kind in ("lib", "bin") for folder in sorted(Path(root).glob(f"*/{kind}"))]
    candidates = [*_in_folders(map(Path, folders), "*nvrtc*"), name, "libnvrtc.so"]
    for candidate in [*candidates, *_in_folders(places, f"{name}*")]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(candidate)
    raise OSError(f"{name}, NVIDIA's run-time compiler, is not there: pip install nvidia-cuda-nvrtc")


def _in_folders(folders: Iterable[Path], pattern: str) -> list[str]:
    found = [path for folder in folders for path in sorted(folder.glob(pattern))]
    return [str(path) for path in found if "builtins" not in path.name and ".alt." not in path.name]


def compiled(source: str, capability: tuple[int, int], library: ctypes.CDLL | None = None) -> bytes:
    """Machine code of CUDA source, for GPUs of a compute capability; nothing is contracted into fused operations.

    Raises: RuntimeError where the compiler refuses it, with what it says.
    """
    nvrtc = library or find_nvrtc()
    program = ctypes.c_void_p()

    def check(result: int) -> None:
        if result:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result).decode()}")

    def text(kind: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        found = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{kind}")(program, found))
        return found.raw

    architecture = "".join(map(str, capability))
    options = [f"--gpu-architecture=sm_{architecture}".encode(), b"--fmad=false", b"--std=c++17"]
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            raise RuntimeError(f"NVRTC does not compile it: {text('ProgramLog').rstrip(bytes(1)).decode()}")
        return text("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


# -- starting -----------------------------------------------------------------------------------------------------
@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(result: int) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(name))
        raise RuntimeError(f"CUDA: {(name.value or b'error').decode()} ({result})")


def _have_context(device: torch.device) -> None:
    """Gives a thread, whose first use of a GPU this may be, the context that torch uses."""
    context, number = ctypes.c_void_p(), ctypes.c_int()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _check(_driver().cuDeviceGet(ctypes.byref(number), device.index))
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
        _check(_driver().cuCtxSetCurrent(context))


class Kernels:
    """The kernels of a binary on a device.

    Args:
        binary: what ``compiled`` returns.
        device: whose index is known.
    """

    def __init__(self, binary: bytes, device: torch.device) -> None:
        self._device, self._module = device, ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._allowed: dict[str, int] = {}  # shared memory
        with torch.cuda.device(device):
            _have_context(device)
            _check(_driver().cuModuleLoadData(ctypes.byref(self._module), binary))

    def launch(self, name: str, blocks: int, threads: int, shared: int, *arguments: Tensor | int | None) -> None:
        """Starts one on the current stream.

        Args:
            name: of the kernel.
            blocks, threads: how many, and in each.
            shared: bytes of shared memory that each block is given besides.
            arguments: tensors on the device, None for a null pointer, and 32-bit integers.
        """
        with torch.cuda.device(self._device):
            _have_context(self._device)
            values: list[ctypes.c_void_p | ctypes.c_int] = []
            for value in arguments:
                pointer = value.data_ptr() if isinstance(value, Tensor) else None
                values.append(ctypes.c_int(value) if isinstance(value, int) else ctypes.c_void_p(pointer))
            places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            function = self._function(name)
            if shared > self._allowed.get(name, SHARED - 1024):  # of which it may have some of its own
                _check(_driver().cuFuncSetAttribute(function, _MOST_SHARED, shared))
                self._allowed[name] = shared
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            sizes = (blocks, 1, 1, threads, 1, 1, shared)
            _check(_driver().cuLaunchKernel(function, *sizes, stream, places, None))

    def _function(self, name: str) -> ctypes.c_void_p:
        if name not in self._functions:
            found = ctypes.c_void_p()
            _check(_driver().cuModuleGetFunction(ctypes.byref(found), self._module, name.encode()))
            self._functions[name] = found
        return self._functions[name]
