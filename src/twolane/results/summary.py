"""Results as JSON, with the keys of `vllm bench serve`, and as tables."""

import math
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from twolane import __version__
from twolane.common.printable import printable
from twolane.results.metrics import Distribution, Metrics, bound_words, bounded
from twolane.results.provenance import json_bytes, provenance
from twolane.results.result import BenchConfig, Energy, EngineGaps, Result
from twolane.workload.spec import WorkloadSpec

LAG_BOUND = 0.01
"""Seconds of client lag at the 99th percentile above which a run is doubtful."""


def result_json(result: Result) -> bytes:
    """Return the result as JSON text."""
    return json_bytes(result_dict(result))


def result_dict(result: Result) -> dict[str, object]:
    """Return the result with the keys of `vllm bench serve`, followed by our own.

    As there, totals and latencies are over completed requests, and the lists have one entry for
    each request sent. A value that does not exist is null.
    """
    metrics = result.metrics
    config = result.config
    return {
        "date": result.date.strftime("%Y%m%d-%H%M%S"),
        "provenance": provenance(workload_dict(config.workload)),
        "backend": _backend(result),
        "label": None,
        "model_id": result.model,
        "tokenizer_id": None,
        "num_prompts": len(result.workload),
        "request_rate": rate_label(result),
        "burstiness": config.workload.burstiness,
        "max_concurrency": config.max_concurrency,
        "duration": result.duration,
        **_totals(metrics, bool(config.goodput)),
        **_lists(result),
        **_latencies(metrics),
        **_ours(result),
    }


def _backend(result: Result) -> str:
    if result.simulated is not None:
        return "simulation"
    return "openai-chat" if result.config.chat else "openai"


def workload_dict(workload: WorkloadSpec) -> dict[str, object]:
    """Return all options of a workload; "inf" for infinity, which JSON lacks."""
    fields = msgspec.structs.asdict(workload)
    return {name: "inf" if value == math.inf else value for name, value in fields.items()}


def default_name(result: Result) -> str:
    """Return a file name like vLLM's: backend, rate, concurrency, model, date."""
    config = result.config
    bound = f"-concurrency{config.max_concurrency}" if config.max_concurrency else ""
    model = Path(result.model).name
    date = result.date.strftime("%Y%m%d-%H%M%S")
    backend = "openai" if result.simulated is None else "simulation"
    return f"{backend}-{rate_label(result)}qps{bound}-{model}-{date}.json"


def rate_label(result: Result) -> float | str:
    """Return the request rate; "inf": all at once; "trace": the trace's own times."""
    rate = result.config.workload.request_rate
    if rate is None:
        return "trace" if any(request.arrival for request in result.workload) else "inf"
    return "inf" if math.isinf(rate) else rate


def warnings(result: Result) -> list[str]:
    """Return warnings about the figures."""
    metrics = result.metrics
    lines = []
    if result.interrupted:
        lines.append(
            f"the run ended early, after {metrics.sent} of {len(result.workload)} requests: its "
            "figures are of the part until then, and what was open met no SLO"
        )
    lag = metrics.lag.percentiles[99.0] or 0.0
    if lag > LAG_BOUND and rate_label(result) != "inf":
        lines.append(f"the client is a bottleneck: it sent up to {_ms(lag)} ms late (P99)")
    loop = result.loop_lag.percentiles[99.0] or 0.0
    if loop > LAG_BOUND:
        lines.append(
            f"the client is a bottleneck: it read the clock up to {_ms(loop)} ms late (P99)"
        )
    stalled, bound = result.loop_lag.max or 0.0, result.config.goodput.get("tbt", math.inf)
    if stalled > bound:
        lines.append(
            f"the client, or its host, stood still for {_ms(stalled)} ms: gaps of that moment are "
            "not the server's"
        )
    # Tokens per chunk above which gaps between chunks get a warning.
    if (metrics.tokens_per_chunk or 0.0) > 1.05:
        lines.append(
            f"the server sends {metrics.tokens_per_chunk:.2f} tokens a chunk: TBT is the time "
            "between chunks"
        )
    cached = metrics.cached_tokens / metrics.input_tokens if metrics.input_tokens else 0.0
    # Share of cached input tokens above which a run of unrelated prompts gets a warning.
    if cached > 0.2 and not any(request.hash_ids for request in result.workload):
        lines.append(
            f"{cached:.0%} of the input tokens were in the server's prefix cache, so prompts were "
            "hardly computed: it has seen them before. Another --seed draws new ones"
        )
    if metrics.uncounted:
        lines.append(
            f"{metrics.uncounted} answers came without usage: their tokens are counted by chunks"
        )
    if metrics.shown is not None and metrics.shown.uncounted:
        lines.append(
            f"{metrics.shown.uncounted} answers have chunks of an unknown number of tokens: in the "
            "playout each counts as one"
        )
    short = sum(r.ok and r.output_tokens < r.asked_output for r in result.records)
    if result.config.ignore_eos and short:
        lines.append(f"{short} answers are shorter than asked although ignore_eos was set")
    return lines


def first_errors(result: Result) -> list[tuple[str, str]]:
    """Return the first error of each kind of failure."""
    errors: dict[str, str] = {}
    for record in result.records:
        if not record.ok:
            errors.setdefault(record.outcome, record.error)
    return sorted(errors.items())


def summary(result: Result) -> RenderableType:
    """Return tables of counts, latencies and SLOs, and the warnings, for a terminal."""
    parts: list[RenderableType] = [_counts_table(result), _latency_table(result)]
    if result.config.goodput:
        parts.append(_slo_table(result))
    parts += [
        f"[red]{kind}[/red]: {escape(printable(error))}" for kind, error in first_errors(result)
    ]
    parts += [f"[yellow]Warning:[/yellow] {text}" for text in warnings(result)]
    return Group(*parts)


def _totals(metrics: Metrics, has_slos: bool) -> dict[str, object]:
    total = metrics.input_tokens + metrics.output_tokens
    return {
        "completed": metrics.completed,
        "failed": metrics.sent - metrics.completed,
        "total_input_tokens": metrics.input_tokens,
        "total_output_tokens": metrics.output_tokens,
        "request_throughput": metrics.per_second(metrics.completed),
        "request_goodput": metrics.per_second(metrics.attainment.good) if has_slos else None,
        "output_throughput": metrics.per_second(metrics.output_tokens),
        "total_token_throughput": metrics.per_second(total),
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent,
        "sustained_throughput": metrics.steady.finished if metrics.steady else None,
    }


def _lists(result: Result) -> dict[str, object]:
    """Return lists with an entry for each request sent, in seconds; failed ones have an error and
    no output."""
    records = result.records
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens if record.ok else 0 for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.gaps for record in records],
        "latencies": [record.e2e for record in records],
        "start_times": [record.sent for record in records],
        "queue_times": [record.waited for record in records],
        "generated_texts": [record.text for record in records],
        "errors": ["" if record.ok else f"{record.outcome}: {record.error}" for record in records],
    }


def _latencies(metrics: Metrics) -> dict[str, object]:
    keys: dict[str, object] = {}
    for name, values in (
        ("ttft", metrics.ttft),
        ("tpot", metrics.tpot),
        ("itl", metrics.tbt),
        ("e2el", metrics.e2e),
        ("client_queue_time", metrics.waited),
        ("send_lag", metrics.lag),
    ):
        keys |= _statistics(name, values)
    return keys


def _statistics(name: str, values: Distribution) -> dict[str, object]:
    return {
        f"mean_{name}_ms": _in_ms(values.mean),
        f"median_{name}_ms": _in_ms(values.median),
        f"std_{name}_ms": _in_ms(values.std),
        **{f"p{p:g}_{name}_ms": _in_ms(value) for p, value in values.percentiles.items()},
        f"max_{name}_ms": _in_ms(values.max),
    }


def _ours(result: Result) -> dict[str, object]:
    metrics = result.metrics
    known = {
        "simulated": result.simulated,
        "server": result.server,
        "engine_itl_ms": result.engine_gaps and _engine_gaps(result.engine_gaps),
        "energy": result.energy and _energy(result.energy, metrics),
    }
    return {
        "twolane_version": __version__,
        "interrupted": result.interrupted,
        **{name: value for name, value in known.items() if value is not None},
        "sent": metrics.sent,
        "total_cached_tokens": metrics.cached_tokens,
        "outcomes": metrics.outcomes,
        "slos_ms": {name: bound * 1e3 for name, bound in result.config.goodput.items()},
        "attainment": metrics.attainment.requests,
        "attainment_all": metrics.attainment.together,
        "tbt_gap_attainment": metrics.attainment.gaps,
        **_playout(result),
        "tokens_per_chunk": metrics.tokens_per_chunk,
        "outputs_without_usage": metrics.uncounted,
        **_statistics("client_loop_lag", result.loop_lag),
        "warnings": warnings(result),
        "seed": result.config.workload.seed,
        "dataset": result.config.workload.dataset,
        "arguments": _arguments(result.config),
        "workload": _workload(result),
    }


def _playout(result: Result) -> dict[str, object]:
    """Return what a client with a playout buffer shows, if there is one."""
    if (shown := result.metrics.shown) is None:
        return {}
    return {
        "playout_ms": result.config.playout * 1e3,
        **_statistics("shown_ttft", shown.ttft),
        **_statistics("shown_itl", shown.tbt),
        "shown_attainment": shown.attainment.requests,
        "shown_attainment_all": shown.attainment.together,
        "shown_tbt_gap_attainment": shown.attainment.gaps,
        "playout_uncounted": shown.uncounted,
    }


def _energy(energy: Energy, metrics: Metrics) -> dict[str, object]:
    done, tokens = metrics.completed, metrics.output_tokens
    return {
        **msgspec.structs.asdict(energy),
        "joules_per_request": energy.joules / done if done else None,
        "joules_per_output_token": energy.joules / tokens if tokens else None,
    }


def _engine_gaps(gaps: EngineGaps) -> dict[str, object]:
    within = None if math.isinf(gaps.within) else gaps.within * 1e3
    return {
        "metric": gaps.metric,
        "count": gaps.count,
        "mean": gaps.mean * 1e3,
        "p99_above": gaps.above * 1e3,
        "p99_within": within,
        **({} if gaps.due is None else {"due": _engine_gaps(gaps.due)}),
    }


def _arguments(config: BenchConfig) -> dict[str, object]:
    """Return all options without secrets: no API key, and only names of headers."""
    fields = msgspec.structs.asdict(config)
    workload = workload_dict(fields.pop("workload"))
    del fields["api_key"]
    slos = {name: bound * 1e3 for name, bound in config.goodput.items()}
    return {**fields, "headers": sorted(config.headers), "goodput": slos, **workload}


def _workload(result: Result) -> dict[str, object]:
    """Return the workload by column; with the seed it determines every prompt."""
    columns: dict[str, object] = {
        "arrivals": [request.arrival for request in result.workload],
        "prompt_tokens": [request.prompt_tokens for request in result.workload],
        "output_tokens": [request.output_tokens for request in result.workload],
    }
    if any(request.hash_ids for request in result.workload):
        columns["block_tokens"] = result.workload[0].block_tokens
        columns["hash_ids"] = [request.hash_ids for request in result.workload]
    return columns


def _counts_table(result: Result) -> Table:
    metrics = result.metrics
    title = "Interrupted benchmark" if result.interrupted else "Benchmark"
    table = Table(
        title=f"{title} of {escape(printable(result.model))}",
        show_header=False,
        title_justify="left",
    )
    table.add_column()
    table.add_column(justify="right")
    outcomes = [f"{name} {count}" for name, count in sorted(metrics.outcomes.items())]
    rows = {
        "Requests sent / asked": f"{metrics.sent} / {len(result.workload)}",
        "Outcomes": ", ".join(outcomes) or "none",
        "Duration (s)": f"{metrics.duration:.2f}",
        "Input / output tokens": f"{metrics.input_tokens} / {metrics.output_tokens}",
        "Input tokens in prefix cache": f"{metrics.cached_tokens}",
        "Requests/s": _number(metrics.per_second(metrics.completed)),
        "Requests/s after the warm-up, sent / finished": _steady(metrics),
        "Output tokens/s": _number(metrics.per_second(metrics.output_tokens)),
        "Most requests at once": f"{metrics.max_concurrent}",
    }
    if (energy := result.energy) is not None:
        each = energy.joules / metrics.completed if metrics.completed else None
        clock = "" if energy.sm_hz is None else f", SMs at {energy.sm_hz / 1e6:.0f} MHz"
        rows["Energy per request (J)"] = _number(each)
        rows["Power (W) / limit"] = f"{energy.watts:.0f} / {energy.cap_watts:.0f}{clock}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _latency_table(result: Result) -> Table:
    metrics = result.metrics
    table = Table(title="Latency of completed requests (ms)", title_justify="left")
    table.add_column()
    heads = [f"P{p:g}" for p in result.config.percentiles]
    for head in ("Mean", "Median", "Std", *heads, "Max"):
        table.add_column(head, justify="right")
    rows = [("TTFT", metrics.ttft), ("TBT", metrics.tbt)]
    if metrics.shown is not None:
        rows += [("TTFT as shown", metrics.shown.ttft), ("TBT as shown", metrics.shown.tbt)]
    for name, values in (*rows, ("TPOT", metrics.tpot), ("E2E", metrics.e2e)):
        spread = [values.percentiles[p] for p in result.config.percentiles]
        cells = (values.mean, values.median, values.std, *spread, values.max)
        table.add_row(name, *(_ms(cell) for cell in cells))
    if (gaps := result.engine_gaps) is not None:
        due = "" if gaps.due is None else f"as due {_bucket(gaps.due)}, "
        client = _ms(metrics.tbt.percentiles.get(99.0))
        table.caption = f"P99 of TBT: {due}as written {_bucket(gaps)}, at the client {client}"
    return table


def _bucket(gaps: EngineGaps) -> str:
    return f"{_ms(gaps.above)} to {_ms(gaps.within)}"


def _slo_table(result: Result) -> Table:
    metrics = result.metrics
    columns = [metrics.attainment, *([metrics.shown.attainment] if metrics.shown else [])]
    table = Table(title="Attainment over requests sent", title_justify="left")
    table.add_column("SLO")
    for head in ("Bound", "Attained", "As shown")[: 1 + len(columns)]:
        table.add_column(head, justify="right")
    slos_ms = {name: bound * 1e3 for name, bound in result.config.goodput.items()}
    for name in bounded(slos_ms):
        bound = bound_words(name, slos_ms)
        label = "TBT, every gap of a request" if name == "tbt" else name.upper()
        table.add_row(label, bound, *(_percent(one.requests[name]) for one in columns))
        if name == "tbt":
            table.add_row("TBT, of all gaps owed", bound, *(_percent(one.gaps) for one in columns))
    table.add_row("All together", "", *(_percent(one.together) for one in columns))
    rates = [_number(metrics.per_second(one.good)) for one in columns]
    table.add_row("Requests/s that met all", "", *rates)
    if metrics.shown is not None:
        table.caption = f"As shown: with a playout buffer of {result.config.playout * 1e3:g} ms"
    return table


def _steady(metrics: Metrics) -> str:
    steady = metrics.steady
    if steady is None:
        return "-"
    return f"{steady.arrived:.2f} / {steady.finished:.2f} in {steady.seconds:.0f} s"


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _ms(seconds: float | None) -> str:
    """Return milliseconds with five digits at least, short enough for a terminal of 80 columns."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.{2 if seconds < 1 else 1 if seconds < 10 else 0}f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
