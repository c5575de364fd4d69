"""`twolane simulate`: the real engine on simulated GPUs.

**Examples**

- `twolane simulate llama-3.1-8b --gpu h200 --dataset azure-conv --request-rate 10` — a built-in
  shape on an H200, 1,000 requests with lengths like those of Azure's chat service

- `twolane simulate llama-3.1-70b --gpu a100-80gb --tensor-parallel-size 8
  --dataset mooncake_trace.jsonl.gz --system chunked --option token_budget=256
  --goodput ttft:2000 tbt:100` — a recorded trace at its own times, prefixes shared as recorded, on
  eight GPUs
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from twolane.cli.bench import common
from twolane.cli.configfile import config_option
from twolane.cli.errors import one_line_errors
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import ModelArgument, takes, takes_engine_settings
from twolane.common.options import Option
from twolane.engine.config import KV_EVENTS, LORA, TRANSPORT_SECONDS, EngineConfig
from twolane.results.result import MEASURE, BenchConfig
from twolane.sim.config import SimulateConfig

app = command_app()

MEANT = (*common.WORKLOAD - {"seed"}, "vocab_range", "metric_percentiles", "playout_ms")
"""Options of `bench serve` that have a meaning without HTTP; the seed is the engine's."""


class Files(msgspec.Struct, frozen=True):
    """Where results are written."""

    result_file: Annotated[Path | None, Option(MEASURE)] = None
    """Write the result as JSON to this file."""
    requests_file: Annotated[Path | None, Option(MEASURE)] = None
    """Write a line of CSV for each request."""


@app.command(cls=Command)
@takes(Files, "files")
@takes_engine_settings(
    *("load_format", "dtype", "profile", "chat_template", "capture_when_idle", *LORA, *KV_EVENTS),
    # Where it runs is `SimulateConfig`'s.
    *("device", "cores", "tensor_parallel_size", "all_reduce"),
)
@takes(SimulateConfig, "where")
@takes(BenchConfig, "load", only=MEANT)
def simulate(
    model: ModelArgument,
    config: EngineConfig,
    where: dict[str, Any],
    load: dict[str, Any],
    files: dict[str, Any],
    more_slos: common.MoreSlos = None,
    config_file: Annotated[Path | None, config_option()] = None,
    goodput: common.Goodput = None,
) -> None:
    """Serve a workload with the real engine on simulated GPUs, on a virtual clock."""
    from twolane.sim import run as simulation

    with one_line_errors(), common.workload_errors():
        for name, path in files.items():
            common.need_folder(f"--{name.replace('_', '-')}", path)
        bench = BenchConfig(**load, goodput=common.slos(goodput, more_slos))
        workload = msgspec.structs.replace(bench.workload, seed=config.seed)
        bench = msgspec.structs.replace(bench, workload=workload)
        engine = msgspec.structs.replace(config, transport=TRANSPORT_SECONDS)  # as a server plans
        settings = SimulateConfig(engine=engine, bench=bench, **where)
        simulation.show(settings, **files)
