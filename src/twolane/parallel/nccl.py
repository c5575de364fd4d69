"""NCCL by its C interface: what can be captured into CUDA graphs on any stream, and nothing else.

PyTorch's own process groups are not used: their watchdog asks for events while graphs are
captured, and they launch on streams of their own, outside a lane's share of the SMs.
"""

import ctypes
import os
import threading
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

ID_BYTES = 128
"""Bytes of a communicator's id."""
_TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""`ncclDataType_t` by PyTorch's type (nccl.h)."""
_SUCCESS, _IN_PROGRESS = 0, 7
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast
    "NCCL_GRAPH_MIXING_SUPPORT": "0",  # a lane's launches never overlap, so nothing is ordered
    "NCCL_GRAPH_REGISTER": "0",  # no exchange between ranks while graphs are captured
    "NCCL_RUNTIME_CONNECT": "0",  # all connections at the start, none at a first use
}
"""Settings of NCCL that lanes rely on, unless the user sets others."""


class NcclError(RuntimeError):
    """NCCL refused a call; the message says which and why."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@lru_cache
def _library() -> Any:
    """Return the library that PyTorch has loaded.

    Raises:
        NcclError: there is none.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise NcclError(f"NCCL is not there: {error}") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [pointer]
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclSend.argtypes = [pointer, size, number, number, pointer, pointer]
    library.ncclRecv.argtypes = [pointer, size, number, number, pointer, pointer]
    return library


def unique_id() -> bytes:
    """Make the id of a new communicator, which all its ranks must be given; `ID_BYTES` long."""
    unique = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    return bytes(unique)


class Communicator:
    """Some ranks that compute sums together. At most one launch of it may be under way at a time.

    Every call queues a kernel on the current stream, whose share of the SMs it keeps to, and does
    not wait. The calls must be the same in the same order on all ranks.

    Args:
        rank: The rank of this process, whose current device it is.
        size: number of ranks.
        unique: id of the communicator, from `unique_id`.

    Raises:
        NcclError: it cannot be made.
    """

    def __init__(self, rank: int, size: int, unique: bytes) -> None:
        self.rank, self.size = rank, size
        self._nccl = _library()
        self._handle = ctypes.c_void_p()
        self._calls, self._aborted = threading.Lock(), False
        made = _UniqueId.from_buffer_copy(unique)
        code = self._nccl.ncclCommInitRank(ctypes.byref(self._handle), size, made, rank)
        _check(code, "ncclCommInitRank")

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory [rows, width] for partial sums; `all_reduce` takes any other, too."""
        return torch.empty((rows, width), dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all ranks; the bits are the same on all of them."""
        pointer, kind = tensor.data_ptr(), _TYPES[tensor.dtype]
        # NCCL's number of the operation that adds.
        self._call("ncclAllReduce", pointer, pointer, tensor.numel(), kind, 0)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace the tensor by rank 0's."""
        pointer, kind, root = tensor.data_ptr(), _TYPES[tensor.dtype], 0
        self._call("ncclBroadcast", pointer, pointer, tensor.numel(), kind, root)

    def gather(self, parts: Tensor) -> None:
        """Bring all ranks' `parts[0]` to rank 0, whose `parts` is [size, ...]."""
        count, kind = parts[0].numel(), _TYPES[parts.dtype]
        _check(self._nccl.ncclGroupStart(), "ncclGroupStart")
        if self.rank > 0:
            self._call("ncclSend", parts.data_ptr(), count, kind, 0)
        else:
            for other in range(1, self.size):
                self._call("ncclRecv", parts[other].data_ptr(), count, kind, other)
        _check(self._nccl.ncclGroupEnd(), "ncclGroupEnd")

    def abort(self) -> None:
        """End its kernels wherever they wait, for a rank is lost; no call is made from then on.

        It may take seconds to return; the kernels end at once.
        """
        with self._calls:
            self._aborted = True
        self._nccl.ncclCommAbort(self._handle)

    def _call(self, name: str, *args: object) -> None:
        with self._calls:
            if self._aborted:
                raise NcclError(f"{name} was called after another rank was lost")
            _check(getattr(self._nccl, name)(*args, self._handle, _stream()), name)


def join(rank: int, size: int, store: dist.Store) -> Communicator:
    """Make a communicator of all ranks; returns when each of them has called this.

    Args:
        rank: The rank of this process, whose current device it is.
        size: number of ranks.
        store: carries the communicator's id, so each communicator needs a part of its own.

    Raises:
        NcclError: it cannot be made.
    """
    if rank == 0:
        store.set("id", unique_id())
    return Communicator(rank, size, store.get("id"))


def version() -> str:
    """Return the library's version."""
    number = ctypes.c_int()
    _check(_library().ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _check(code: int, call: str) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        name, detail = _library().ncclGetErrorString(code), _library().ncclGetLastError(None)
        what = [text.decode() for text in (name, detail) if text]
        raise NcclError(f"{call} failed: {': '.join(what)}")
