"""Checks of the engine's settings that need no weights: the API process makes them before it
starts an engine, the engine when it is built."""

import math
import os
from pathlib import Path

from twolane.common.errors import FieldError
from twolane.common.files import is_folder
from twolane.common.options import check_ranges, check_types
from twolane.common.resources import usable_cores
from twolane.engine.config import EngineConfig
from twolane.model.spec import ModelSpec
from twolane.systems.baselines.chunked import Chunked
from twolane.systems.registry import DISAGGREGATED, make_system


def check_settings(config: EngineConfig) -> None:
    """Refuse settings that can be seen to be wrong before anything is loaded.

    Raises:
        FieldError: the first that is.
    """
    check_types(config)
    check_ranges(config)
    if not math.isfinite(config.transport):
        raise FieldError("transport", f"must be finite, not {config.transport}")
    if config.transport < 0:
        raise FieldError("transport", f"must be at least 0, not {config.transport}")
    if config.slo.ttft_per_token and config.slo.ttft is None:
        raise FieldError("slo_ttft_per_token", "needs slo_ttft, to which it is added")
    usable = len(usable_cores())
    if config.cores is not None and not 1 <= config.cores <= usable:
        raise FieldError("cores", f"must be between 1 and {usable} here, not {config.cores}")
    _check_device(config)
    _check_disaggregated(config)
    length, positions, pool = config.max_model_len, config.max_positions, config.kv_tokens
    if length is not None and positions is not None and length > positions:
        raise FieldError("max_model_len", f"{length} exceeds max_positions {positions}")
    page_size = config.page_size or 16  # the least there is by itself: the engine looks again
    if pool is not None and pool // page_size * page_size < (length or 2):
        request = f"one request of {length or 2} tokens in pages of {page_size}"
        raise FieldError("kv_tokens", f"{pool} does not hold {request}")
    if len(config.lora) > config.max_loras:
        raise FieldError(
            "lora", f"has {len(config.lora)} adapters, and max_loras is {config.max_loras}"
        )
    for name, path in config.lora.items():
        if not name or not is_folder(Path(path)):
            raise FieldError("lora", f"{name}={path}: there is no such directory")
    _check_prefix_cache(config)
    if config.trace is not None and not _is_writable(Path(config.trace)):
        raise FieldError("trace", f"{config.trace} cannot be written")
    if config.profile is not None and not _is_readable(Path(config.profile)):
        raise FieldError("profile", f"{config.profile} cannot be read")
    if config.system is not None:
        make_system(config.system, config.options)
    elif config.options:
        first = next(iter(config.options))
        problem = f"{first!r} is a setting of a system: give --system too"
        raise FieldError("options", problem)


def check_served(config: EngineConfig) -> None:
    """Refuse the same settings, and those that have a meaning in simulation alone.

    Raises:
        FieldError: the first that is.
    """
    check_settings(config)
    if (option := simulated_option(config)) is not None:
        raise FieldError("options", f"{option} of system chunked is only for simulation")


def level_shares(config: EngineConfig, units: int, step: int) -> tuple[int, ...] | None:
    """Return the units for decode of each level: the listed ones, else those that the system wants.

    Args:
        config: The engine's settings.
        units: The number of units of the device.
        step: The number of units between two shares on offer.

    Returns:
        The units, or None for the device's own default.
    """
    if config.levels is not None or config.system is None:
        return config.levels
    wanted = make_system(config.system, config.options).decode_shares(units, step)
    return None if wanted is None else tuple(wanted)


def simulated_option(config: EngineConfig) -> str | None:
    """Return the option of the system that only simulated devices honour; None if there is none."""
    system = make_system(config.system, config.options) if config.system else None
    if not isinstance(system, Chunked):
        return None
    if system.nano_batches > 1:
        return "nano_batches"
    return "fused_attention" if system.fused_attention else None


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the largest number of tokens of one request.

    Raises:
        FieldError: the model has fewer positions.
    """
    positions = config.max_positions or spec.max_positions
    wanted = config.max_model_len or positions
    if wanted > positions:
        raise FieldError(
            "max_model_len",
            f"{wanted} exceeds the model's {positions} positions; max_positions raises those",
        )
    return wanted


def _check_disaggregated(config: EngineConfig) -> None:
    """Refuse what does not go with devices of their own for prefill and decode."""
    if not config.disaggregated:
        return
    if config.system not in (None, DISAGGREGATED):
        raise FieldError(
            "system",
            f"must be {DISAGGREGATED} with disaggregated, not {config.system}, which shares one "
            "device between prefill and decode",
        )
    if config.tensor_parallel_size > 1:
        raise FieldError("disaggregated", "needs tensor_parallel_size 1: each lane has one rank")
    if config.levels is not None:
        raise FieldError("levels", "do not go with disaggregated: each lane has a whole GPU")


def _check_prefix_cache(config: EngineConfig) -> None:
    """Refuse settings of a prefix cache that is off, and addresses for events that there are none
    of."""
    if config.snapshots is not None and not config.prefix_cache:
        raise FieldError("snapshots", "need the prefix cache, which is off")
    events = config.kv_events
    if events.endpoint is not None and not config.prefix_cache:
        raise FieldError("kv_events_endpoint", "needs the prefix cache, which is off")
    if events.endpoint is None and events.replay_endpoint is not None:
        raise FieldError("kv_events_replay_endpoint", "needs kv_events_endpoint")
    for name in ("endpoint", "replay_endpoint"):
        address = getattr(events, name) or ""
        port = address.rpartition(":")[2]
        if address.startswith("tcp://") and port != "*" and not is_port(port):
            problem = f"{address!r} must end with a port of at most 65535"  # ZeroMQ takes any
            raise FieldError(f"kv_events_{name}", problem)


def is_port(text: str) -> bool:
    """Return whether a text is the number of a TCP port."""
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 1 << 16


def _is_readable(file: Path) -> bool:
    """Return whether a file exists and can be read."""
    return not is_folder(file) and os.access(file, os.R_OK)


def _is_writable(file: Path) -> bool:
    """Return whether a file can be written, which need not exist yet."""
    try:
        if file.exists():
            return not file.is_dir() and os.access(file, os.W_OK)
    except OSError:  # no file can have this name
        return False
    return os.access(file.absolute().parent, os.W_OK)


def _check_device(config: EngineConfig) -> None:
    """Refuse settings of one device with the other."""
    if config.device == "cuda" and config.cores is not None:
        raise FieldError("cores", "is only for CPUs, and the device is cuda")
    if config.levels is not None:
        if config.device == "cpu" or config.cores is not None:
            raise FieldError("levels", "are only for GPUs, and the device is the CPU")
        if any(units < 1 for units in config.levels):
            raise FieldError("levels", f"must be positive, not {min(config.levels)}")
    if config.capture_when_idle and config.ranks > 1:
        problem = "is only for one GPU: ranks and 1P1D capture all graphs first"
        raise FieldError("capture_when_idle", problem)
