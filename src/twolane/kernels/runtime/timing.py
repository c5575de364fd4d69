"""Timing of launches."""

import statistics
from collections.abc import Callable

import torch


def graph_seconds(run: Callable[[], None], repeats: int) -> float:
    """Return the median over replays of a graph of `run`, on torch's current stream."""
    stream = torch.cuda.current_stream()
    run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times[1:]) * 1e-3
