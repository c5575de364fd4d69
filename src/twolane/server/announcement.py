"""The three lines that `twolane serve` prints on standard output once it serves."""

import functools
import shlex
from collections.abc import Iterator

import twolane
from twolane.common.options import settings_of
from twolane.engine.config import UNPROFILED, EngineConfig
from twolane.engine.messages import Ready
from twolane.slo import Slo


def announcement(
    ready: Ready, config: EngineConfig, model_name: str, address: str, *, refuses: bool = True
) -> str:
    """Return the three lines: served model and bounds, profile, dashboard.

    The parts of the first line are separated by " | ", and the second part is the address.
    """
    levels = " ".join(f"({prefill},{decode})" for prefill, decode in ready.levels)
    units = "1 unit" if ready.units == 1 else f"{ready.units} units"
    return "\n".join(
        (
            f"Twolane {twolane.__version__} | {address} | {model_name} | {ready.system} on "
            f"{ready.device}, {devices(config)}{units}, levels {levels} | "
            f"KV {ready.kv_tokens:,} tokens, context {ready.max_model_len:,}, "
            f"{ready.max_running} requests at once | "
            f"{bounds(ready.slo, refuses=refuses)}",
            profile_line(ready, config),
            f"Dashboard: {address}/dashboard",
        )
    )


def devices(config: EngineConfig) -> str:
    """Return the number of ranks or 1P1D; empty for a single process."""
    if config.disaggregated:
        return "1P1D, "
    ranks = config.tensor_parallel_size
    return f"{ranks} ranks, " if ranks > 1 else ""


def bounds(slo: Slo, *, refuses: bool) -> str:
    """Return the default latency bounds in milliseconds, and whether late requests are refused."""
    parts = []
    if slo.ttft is not None:
        more = f" + {slo.ttft_per_token * 1024e3:g} per 1,024 new tokens"
        late = "late requests are refused" if refuses else "no request is refused"
        parts.append(f"TTFT {slo.ttft * 1e3:g}{more if slo.ttft_per_token else ''} ms ({late})")
    parts += [f"TBT {slo.tbt * 1e3:g} ms"] if slo.tbt is not None else []
    parts += [f"TPOT {slo.tpot * 1e3:g} ms"] if slo.tpot is not None else []
    return "SLOs " + ", ".join(parts) if parts else "no SLOs (see --slo-ttft-ms, --slo-tbt-ms)"


def profile_line(ready: Ready, config: EngineConfig) -> str:
    """Return the profile in use, or the command that makes one."""
    if ready.profile is not None:
        return f"Profile: {ready.profile}"
    none = "Profile: none, so latencies are learnt while serving"
    if config.disaggregated:
        return none
    command = shlex.join(("twolane", "profile", config.model, *profile_options(config)))
    return f"{none}; to make one: {command}"


def profile_options(config: EngineConfig) -> Iterator[str]:
    """Yield the options with which `twolane profile` measures this configuration."""
    for setting in settings_of(EngineConfig):
        value = functools.reduce(getattr, setting.path, config)
        if setting.name not in UNPROFILED and value != setting.default:
            yield setting.flag
            yield ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
