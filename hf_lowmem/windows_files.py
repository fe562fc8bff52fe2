"""``WindowsFile``: a drive's file on Windows, unbuffered; ``Kernel``: the calls of kernel32 that it needs.

[Note: one handle a thread] A synchronous handle serves one call at a time, whatever the offsets. So each thread that
comes opens the file once for itself.

[Note: zeros at first] Windows extends a file synchronously, and what is written beyond its valid length as well. Only a
file that has been written once from first to last is overwritten in parallel.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from ctypes import wintypes
from typing import Any

from .drive_file import DriveFile, address, failure

MOST = 2**30  # bytes a call: its count has 32 bits
END_OF_FILE = 38
NO_BUFFERING = 0x20000000
READ_WRITE = 0xC0000000
SHARED = 1 | 2 | 4  # others may read, write and delete it: this process's other threads do
NEW, EXISTING = 1, 3  # CREATE_NEW, OPEN_EXISTING
DRIVES = {4: "network drive", 6: "RAM disk"}


class Overlapped(ctypes.Structure):
    """OVERLAPPED, which carries an offset."""

    _fields_ = (
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset", wintypes.DWORD),
        ("offset_high", wintypes.DWORD),
        ("event", wintypes.HANDLE),
    )


class Kernel:
    """kernel32 by ctypes, which lets other threads run meanwhile. Every failure is an OSError with its ``winerror``."""

    def __init__(self) -> None:
        dll = self._dll = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined, unused-ignore]
        dll.CreateFileW.restype = wintypes.HANDLE
        dll.CreateFileW.argtypes = [
            wintypes.LPCWSTR,
            wintypes.DWORD,
            wintypes.DWORD,
            ctypes.c_void_p,
            wintypes.DWORD,
            wintypes.DWORD,
            wintypes.HANDLE,
        ]
        for call in (dll.ReadFile, dll.WriteFile):
            call.restype = wintypes.BOOL
            call.argtypes = [
                wintypes.HANDLE,
                ctypes.c_void_p,
                wintypes.DWORD,
                ctypes.POINTER(wintypes.DWORD),
                ctypes.POINTER(Overlapped),
            ]
        dll.SetFilePointerEx.argtypes = [wintypes.HANDLE, ctypes.c_longlong, ctypes.c_void_p, wintypes.DWORD]
        for call in (dll.SetEndOfFile, dll.FlushFileBuffers, dll.CloseHandle):
            call.argtypes = [wintypes.HANDLE]

    def _error(self) -> OSError:
        return ctypes.WinError(ctypes.get_last_error())  # type: ignore[attr-defined, unused-ignore]

    def open(self, path: str, disposition: int) -> Any:
        handle = self._dll.CreateFileW(path, READ_WRITE, SHARED, None, disposition, NO_BUFFERING, None)
        if handle in (None, ctypes.c_void_p(-1).value):
            raise self._error()
        return handle

    def transfer(self, name: str, handle: Any, where: int, nbytes: int, offset: int) -> int:
        """``ReadFile`` or ``WriteFile``. Returns the bytes moved; 0 at the end of the file."""
        overlapped = Overlapped(0, 0, offset & 0xFFFFFFFF, offset >> 32, None)
        count = wintypes.DWORD(0)
        call = getattr(self._dll, name)
        if not call(handle, where, nbytes, ctypes.byref(count), ctypes.byref(overlapped)):
            error = self._error()
            if getattr(error, "winerror", None) == END_OF_FILE:
                return 0
            raise error
        return count.value

    def set_size(self, handle: Any, nbytes: int) -> None:
        if not (self._dll.SetFilePointerEx(handle, nbytes, None, 0) and self._dll.SetEndOfFile(handle)):
            raise self._error()

    def flush(self, handle: Any) -> None:
        if not self._dll.FlushFileBuffers(handle):
            raise self._error()

    def close(self, handle: Any) -> None:
        self._dll.CloseHandle(handle)


class WindowsFile(DriveFile):
    """See ``DriveFile``. The system checks what ``FILE_FLAG_NO_BUFFERING`` asks for, so it is always direct.

    Args:
        path: of the file.
        create: makes it, and it must not be there.
        kernel: another one than the system's, for tests.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool, kernel: Any = None) -> None:
        super().__init__(os.path.abspath(path))
        self.direct = True
        self._kernel = kernel or Kernel()
        self._own = threading.local()
        self._handles: list[Any] = []
        self._own.handle = self._open(NEW if create else EXISTING)

    def _open(self, disposition: int) -> Any:
        handle = self._kernel.open(self.path, disposition)
        self._handles.append(handle)
        return handle

    def _handle(self) -> Any:
        if getattr(self._own, "handle", None) is None:
            self._own.handle = self._open(EXISTING)
        return self._own.handle

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        return self._kernel.transfer("ReadFile", self._handle(), address(buffer), min(len(buffer), MOST), offset)

    def _write_some(self, buffer: memoryview, offset: int) -> int:
        return self._kernel.transfer("WriteFile", self._handle(), address(buffer), min(len(buffer), MOST), offset)

    def preallocate(self, nbytes: int) -> None:
        try:
            try:
                self._kernel.set_size(self._handle(), nbytes)
            except OSError as error:
                raise failure("preallocating", self.path, 0, nbytes, 0, error) from error
            self.fill(nbytes)  # see [Note: zeros at first]
        except OSError:
            self._kernel.set_size(self._handle(), 0)
            raise

    def size(self) -> int:
        return os.stat(self.path).st_size

    def sync(self) -> None:
        try:
            self._kernel.flush(self._handle())
        except OSError as error:
            raise failure("syncing", self.path, 0, self.nbytes, 0, error) from error

    def close(self) -> None:
        while self._handles:
            self._kernel.close(self._handles.pop())
        self._own = threading.local()


def drive_kind(path: str | os.PathLike[str]) -> str:
    """What Windows says of the drive under a path, where that is no local one."""
    root = os.path.splitdrive(os.path.abspath(path))[0] + "\\"
    if sys.platform != "win32":
        return ""
    return DRIVES.get(ctypes.windll.kernel32.GetDriveTypeW(root), "")
