"""CUDA C++ compiled at run time, without a toolkit: NVRTC, a cache on disk, launches.

The sources include no headers; what several of them use is text in front (`with_hopper`). Machine
code is kept under the user's cache directory, by the hash of source, options and compiler, so that
only the first start compiles.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from twolane.common.files import kept, user_cache

ARCHITECTURE = "sm_90a"


@cache
def available(device: torch.device) -> bool:
    """Return whether the device is a Hopper GPU and cuda-bindings can compile for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import cuda.bindings.nvrtc  # noqa: F401
    except ImportError:
        return False
    return True


def with_hopper(path: Path) -> str:
    """Return a kernel's CUDA C++, preceded by the Hopper instructions that several kernels use."""
    return Path(__file__).with_name("hopper.cuh").read_text() + path.read_text()


def cuda_checked(result: tuple[Any, ...]) -> Any:
    """Return the values of a cuda-bindings call; raise RuntimeError if it failed."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class Kernel:
    """A kernel that is loaded on one device."""

    handle: Any
    """The driver's function."""

    def launch(
        self,
        grid: int,
        threads: int,
        shared: int,
        *parameters: ctypes.Structure,
        early: bool = False,
    ) -> None:
        """Launch on torch's current stream, also into a graph that is being captured.

        Args:
            grid: blocks.
            threads: Number of threads in a block.
            shared: bytes of dynamic shared memory of a block.
            parameters: Parameters of the kernel, passed by value.
            early: start before the kernel in front has ended; this one waits for it where it must
                (programmatic dependent launch).
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if early:
            attribute = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        pointers = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        cuda_checked(driver.cuLaunchKernelEx(config, self.handle, ctypes.addressof(pointers), 0))


def compile_cubin(source: str, options: Sequence[str] = ()) -> bytes:
    """Machine code of CUDA C++ for sm_90a, from the cache if it is there.

    Raises:
        RuntimeError: NVRTC refuses the source; its log is the message.
    """
    from cuda.bindings import nvrtc

    version = cuda_checked(nvrtc.nvrtcVersion())
    arguments = (f"-arch={ARCHITECTURE}", "-std=c++17", *options)
    path = cache_path(repr((source, arguments, version)), "hashed.cubin")
    return kept(path, lambda: _compile(source, arguments))


def driver_version() -> int:
    """CUDA version that the driver supports, as the driver counts it."""
    from cuda.bindings import driver

    return int(cuda_checked(driver.cuDriverGetVersion()))


def _compile(source: str, options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc

    program = cuda_checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if int(status):
            log = b" " * cuda_checked(nvrtc.nvrtcGetProgramLogSize(program))
            cuda_checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(log.decode(errors="replace").strip("\0 \n"))
        cubin: bytes = b" " * cuda_checked(nvrtc.nvrtcGetCUBINSize(program))
        cuda_checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_path(key: str, suffix: str) -> Path:
    """Return the path in the user's cache of the file that depends on all of `key`."""
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return user_cache() / "twolane" / "kernels" / f"{name}.{suffix}"


@cache
def _library(source: str, options: tuple[str, ...]) -> Any:
    from cuda.bindings import driver

    cubin = compile_cubin(source, options)
    return cuda_checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))


@cache
def load(source: str, options: tuple[str, ...], entry: str, shared: int, device: int) -> Kernel:
    """Compile (or find) and load `entry` on CUDA device number `device`.

    Args:
        source: CUDA C++ without includes; `entry` is `extern "C"`.
        options: Options of NVRTC.
        entry: the kernel's name.
        shared: most bytes of dynamic shared memory that launches ask for.
        device: Number of the device in torch.
    """
    from cuda.bindings import driver

    kernel = cuda_checked(driver.cuLibraryGetKernel(_library(source, options), entry.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = cuda_checked(driver.cuDeviceGet(device))
    if shared:
        cuda_checked(driver.cuKernelSetAttribute(attribute, shared, kernel, handle))
    return Kernel(driver.CUfunction(int(kernel)))
