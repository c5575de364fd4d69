"""Loads a model onto the device that the settings name: a CPU's cores, a GPU, or several."""

import torch

from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings, OnProgress
from twolane.lanes.base import Machine
from twolane.lanes.cpu.machine import CpuMachine
from twolane.lanes.disaggregated.cpu_decode import DisaggregatedCpuMachine
from twolane.lanes.ranks.cpu_machine import RankedCpuMachine
from twolane.lanes.settings import check_states_stay, load_shard


def load(settings: DeviceSettings, progress: OnProgress) -> Machine:
    """Load the model onto the device that the settings name.

    Raises:
        FieldError: the device is not there, or does not serve what is asked for.
        ValueError: a setting is wrong, or the model.
    """
    device = chosen_device(settings)
    several = device == "cuda" and settings.tensor_parallel_size > 1
    if settings.all_reduce in ("two-shot", "joined") and not several:
        raise FieldError("all_reduce", "is only for several GPUs")
    if device == "cpu":
        if settings.disaggregated:
            check_states_stay(settings)
            return DisaggregatedCpuMachine(settings, progress)
        kind = RankedCpuMachine if settings.tensor_parallel_size > 1 else CpuMachine
        return kind(settings, progress)
    if settings.disaggregated:
        from twolane.lanes.disaggregated.cuda_decode import DisaggregatedCudaMachine

        if settings.kv_cache_dtype == "fp8":  # emulated GPUs are right with it, real ones untried
            raise FieldError("kv_cache_dtype", "cannot be fp8 yet with disaggregated on GPUs")
        return DisaggregatedCudaMachine(settings, progress)
    if settings.tensor_parallel_size > 1:
        from twolane.lanes.ranks.cuda_machine import RankedCudaMachine

        return RankedCudaMachine(settings, progress)
    from twolane.lanes.cuda.machine import CudaMachine

    spec, weights = load_shard(settings, "cuda", progress)
    return CudaMachine(spec, weights, settings)


def chosen_device(settings: DeviceSettings) -> str:
    """Return the device that is asked for, else a GPU if there is one and no cores are asked for.

    Raises:
        FieldError: it is not there.
    """
    there = torch.cuda.is_available()
    if settings.device == "cuda" and not there:
        raise FieldError("device", "is cuda, but PyTorch finds no NVIDIA GPU")
    if settings.device != "auto":
        return settings.device
    if there and settings.cores is None:
        return "cuda"
    if settings.levels is not None:
        raise FieldError("levels", "are only for GPUs, and PyTorch finds no NVIDIA GPU")
    return "cpu"
