"""Puts an engine together from its settings: model, KV pool, lanes, system."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twolane.engine.config import EngineConfig, usable_cores
from twolane.engine.engine import Engine
from twolane.engine.kv import KVBooks
from twolane.engine.messages import Ready
from twolane.engine.settings import check_settings
from twolane.engine.trace import FileTrace, Trace
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.cpu import CpuLanes
from twolane.lanes.runner import Runner
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.model.hub import resolve
from twolane.model.spec import ModelSpec
from twolane.model.weights import load_decoder
from twolane.systems import make_system

KV_SHARE = 0.25
"""Of the free memory, for the KV pool, unless its size is given."""
KV_MOST_BYTES = 4 * 2**30
"""Of a KV pool whose size is not given, on a CPU."""


@dataclass(frozen=True)
class Built:
    """A running engine's parts."""

    engine: Engine
    lanes: CpuLanes
    trace: Trace
    ready: Ready

    def close(self) -> None:
        """Finish what is queued in the lanes and write out the trace."""
        self.lanes.close()
        self.trace.close()


def build(
    config: EngineConfig, notify: Callable[[], None], progress: Callable[[str, float], None]
) -> Built:
    """Load the model and make the lanes; `notify` is called when a lane has news.

    Raises:
        ValueError: a setting is wrong; the message names it.
        OSError: a file cannot be read or written.
    """
    check_settings(config)
    system = make_system(config.system, config.options)
    cores = usable_cores()[: config.cores]
    torch.set_num_threads(len(cores))  # for loading; each lane sets its own
    decoder = load_decoder(
        resolve(config.model, config.load_format),
        dtype=config.dtype,
        load_format=config.load_format,
        max_positions=config.max_positions,
        seed=config.seed,
        progress=progress,
    )
    spec = decoder.spec
    max_model_len = _max_model_len(config, spec)
    books = _books(config, decoder, max_model_len)
    kv = KVCache(spec, books.total_pages, config.page_size, decoder.dtype)
    lanes = CpuLanes(Runner(decoder, kv, config.page_size, config.max_running), cores, notify)
    trace = FileTrace(config.trace, lanes.clock()) if config.trace else Trace()
    engine = Engine(
        system,
        lanes,
        books,
        layers=spec.layers,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=max_model_len,
        estimator=OnlineEstimator(),
        seed=config.seed,
        trace=trace,
        slo=config.slo,
    )
    return Built(engine, lanes, trace, _ready(config, engine, spec))


def _ready(config: EngineConfig, engine: Engine, spec: ModelSpec) -> Ready:
    lanes, kv = engine.state.lanes, engine.state.kv
    return Ready(
        system=config.system,
        device="cpu",
        units=lanes.units,
        levels=list(lanes.levels),
        max_model_len=engine.max_model_len,
        kv_tokens=kv.total_pages * kv.page_size,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        slo=config.slo,
    )


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    wanted = config.max_model_len or spec.max_positions
    if wanted > spec.max_positions:
        raise ValueError(
            f"max_model_len {wanted} exceeds the model's {spec.max_positions} positions; "
            f"max_positions raises those"
        )
    return wanted


def _books(config: EngineConfig, decoder: Decoder, max_model_len: int) -> KVBooks:
    """Pages for `kv_tokens`, or for a share of the free memory."""
    page_bytes = KVCache.bytes_per_page(decoder.spec, config.page_size, decoder.dtype)
    if config.kv_tokens is not None:
        pages = config.kv_tokens // config.page_size
    else:
        share = min(_free_memory() * KV_SHARE, KV_MOST_BYTES)
        most = config.max_running * -(-max_model_len // config.page_size)
        pages = min(int(share) // page_bytes, most)
        if pages < 1:
            raise MemoryError("not enough free memory for a KV pool")
    return KVBooks(pages, config.page_size, config.max_running, prefix_cache=config.prefix_cache)


def _free_memory() -> int:
    """Bytes that can be allocated without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
