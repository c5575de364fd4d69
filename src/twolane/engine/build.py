"""Puts an engine together from its settings: model, KV pool, lanes, system."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twolane.common.errors import FieldError
from twolane.common.resources import free_memory
from twolane.devices import DeviceSettings, OnProgress
from twolane.engine.adapters.registry import AdapterRegistry
from twolane.engine.config import LEAST_RUNNING, MOST_RUNNING, RUNNING_TOKENS, EngineConfig
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.events import KVJournal
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.kv.publisher import KVEventPublisher
from twolane.engine.messages import Ready
from twolane.engine.pacing import Pacer
from twolane.engine.predict import find_profile, machine_key, make_estimator
from twolane.engine.settings import check_served, context_length, level_shares
from twolane.engine.state import State
from twolane.engine.trace import FileTrace, Trace
from twolane.estimate.adapters import AdapterEstimator
from twolane.kernels.sizes import BUCKET_STEP
from twolane.lanes.base import Lanes, Machine, MachineLanes
from twolane.lanes.load import chosen_device, load
from twolane.lanes.settings import LaneSizes, memory_errors
from twolane.systems.registry import default_system, make_system

SNAPSHOT_SHARE = 1 / 3
"""Share of the memory for pages and snapshots that snapshots of states get, if that is more than
one for each request (docs/notes/hybrid-models.md)."""
LOGIT_BYTES = 4
"""Bytes of a logit."""
SNAPSHOT_TOKENS = 512
"""Tokens of the KV pool for each snapshot at least: small states do not take that share."""
log = logging.getLogger("twolane.engine")


@dataclass(frozen=True)
class Built:
    """A running engine's parts."""

    engine: Engine
    lanes: MachineLanes
    trace: Trace
    kv_events: KVEventPublisher | None
    ready: Ready

    def close(self) -> None:
        """Finish what is queued in the lanes and write out the trace."""
        self.engine.adapters.close()
        self.lanes.close()
        self.trace.close()
        if self.kv_events is not None:
            self.kv_events.close()


def build(config: EngineConfig, notify: Callable[[], None], progress: OnProgress) -> Built:
    """Load the model and make the lanes; `notify` is called when a ticket has results.

    Raises:
        ValueError: a setting is wrong; the message names it.
        OSError: a file cannot be read or written.
    """
    check_served(config)
    settings = device_settings(config)
    with memory_errors(settings):
        return assemble(config, load(settings, progress), notify, progress)


def device_settings(config: EngineConfig) -> DeviceSettings:
    """Return the settings of the lanes, with the levels that the system wants on a GPU.

    Raises:
        FieldError: the device is not there, or is not one for all settings.
    """
    if config.disaggregated:
        return config
    if chosen_device(config) == "cpu":
        if config.capture_when_idle:
            raise FieldError("capture_when_idle", "is only for GPUs, and the device is the CPU")
        return config
    from twolane.lanes.cuda.green_contexts import STEP, sm_count

    return msgspec.structs.replace(config, levels=level_shares(config, sm_count(0), STEP))


def captures_when_idle(config: EngineConfig) -> bool:
    """Return whether some graphs wait until nothing runs: by default those of servers, which alone
    leave time for transport."""
    told = config.capture_when_idle
    return config.transport > 0 if told is None else told


def assemble(
    config: EngineConfig, machine: Machine, notify: Callable[[], None], progress: OnProgress
) -> Built:
    """Build an engine on a loaded machine, from settings that the caller has checked.

    Raises:
        ValueError: a setting does not go with the machine or its model.
        OSError: the trace cannot be written.
    """
    apart = config.disaggregated
    name = config.system or default_system(machine.kind, disaggregated=apart)
    config = msgspec.structs.replace(config, system=name)
    system = make_system(name, config.options)
    spec = machine.spec
    max_model_len = context_length(config, spec)
    config = with_states(with_running(config, machine, max_model_len), machine, max_model_len)
    progress("pool", 0.0)
    kv = make_kv_manager(config, machine, max_model_len)
    kv_events = publisher(config, kv)
    snapshots = 0 if kv.snapshots is None else len(kv.snapshots.ids)
    pool = kv.total_pages, kv.page_size, running(config), max_model_len, snapshots
    sizes = LaneSizes(*pool, kv.page_cost - 1, graphs_later=captures_when_idle(config))
    lanes = machine.start(sizes, notify, progress)
    key = machine_key(machine, lanes.units)
    progress("predictions", 0.0)
    profile = find_profile(config, key)
    name_of = config.estimator or system.estimator
    levels = lanes.levels if system.splits else ()
    keep = machine.kind == "cuda"
    estimator = make_estimator(profile, name_of, key, levels, keep=keep)
    if config.adapter_slots:
        estimator = AdapterEstimator(estimator)
    trace = FileTrace(config.trace, lanes.clock()) if config.trace else Trace()
    at_client = config.tbt_buffer_at == "client"
    pacer = Pacer(config.tbt_buffer, config.transport, at_client=at_client)
    bounds = pacer.planned(config.slo)
    engine = Engine(
        system,
        State(kv, lanes, spec.layers, estimator, trace, bounds, pacer),
        ServedModel(spec.vocab_size, spec.eos_token_ids, max_model_len),
        pass_sizes=machine.pass_sizes,
        seed=config.seed,
        kv_events=kv_events,
        notify=notify,
        adapters=load_adapters(config, lanes, notify, kv_events),
    )
    ready = _ready(config, name, engine, machine, profile)
    trace.about(
        model=config.model,
        system=ready.system,
        options=config.options,
        device=ready.device,
        units=ready.units,
        levels=ready.levels,
        kv_pages=kv.total_pages,
        page_size=kv.page_size,
    )
    return Built(engine, lanes, trace, kv_events, ready)


def load_adapters(
    config: EngineConfig,
    lanes: Lanes,
    notify: Callable[[], None],
    kv_events: KVEventPublisher | None,
) -> AdapterRegistry:
    """Load the adapters of `--lora`; KV events name them and those loaded later.

    Raises:
        FieldError: one cannot be.
    """
    slots = config.adapter_slots
    registry = AdapterRegistry(lanes, slots, notify)
    if kv_events is not None:
        kv_events.journal.adapter = registry.name_of
    for name, path in config.lora.items():
        registry.load_at_start(name, path)
    return registry


def _ready(
    config: EngineConfig, name: str, engine: Engine, machine: Machine, profile: Path | None
) -> Ready:
    lanes, kv, spec = engine.state.lanes, engine.state.kv, machine.spec
    return Ready(
        system=name,
        device=machine.name,
        units=lanes.units,
        levels=list(lanes.levels),
        max_model_len=engine.max_model_len,
        kv_tokens=kv.tokens,
        page_size=kv.page_size,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        slo=config.slo,
        profile=None if profile is None else str(profile),
        kv_cache_dtype=config.kv_cache_dtype,
        adapters=engine.adapters.digests(),
        prefix_cache=kv.prefix_cache,
        state_bytes=machine.state_bytes,
        max_running=running(config),
    )


def publisher(config: EngineConfig, kv: KVCacheManager) -> KVEventPublisher | None:
    """Return the publisher of the prefix tree's changes; None if the settings name no endpoint.

    Raises:
        FieldError: an address cannot be used.
    """
    if config.kv_events.endpoint is None:
        return None
    journal = KVJournal(kv.page_size, states=kv.snapshots is not None, window=kv.window)
    kv.tree.watchers.append(journal)
    if kv.windowed:
        kv.tree.window_watchers.append(journal)
    if kv.snapshots is not None:
        kv.snapshots.watchers.append(journal)
    return KVEventPublisher(config.kv_events, journal)


def make_kv_manager(config: EngineConfig, machine: Machine, max_model_len: int) -> KVCacheManager:
    """Make the manager of a pool of `kv_tokens`, or of the device's share of its memory.

    A pool of `kv_tokens` holds so many in all layers. Where windows have pages of their own it
    holds more of requests that are longer than the window.

    Raises:
        FieldError: a setting is wrong, or no layer of the model has keys and values.
        MemoryError: not even a page fits.
    """
    if not machine.page_token_bytes:
        raise FieldError("model", f"{config.model} has no layer with keys and values to keep")
    page_size = _page_size(config, machine)
    layout = machine.page_layout
    tables, held = 1 + layout.window_tables, layout.layers
    page_bytes = page_size * machine.page_token_bytes * held // len(machine.spec.kv_layers)
    if config.kv_tokens is not None:
        pages = config.kv_tokens // page_size * tables
        if pages < 1:
            raise FieldError("kv_tokens", f"{config.kv_tokens} does not hold a page of {page_size}")
        if machine.kind == "cpu":  # GPUs check it themselves, and simulated ones have no memory
            check_room(config.kv_tokens, pages * page_bytes * config.ranks)
    else:
        most = running(config) * -(-max_model_len // page_size) * tables
        states = running(config) + (config.snapshots or 0)
        room = machine.kv_bytes(max_model_len) - states * machine.state_bytes
        if machine.kind == "cuda":  # both lanes' logits, beyond those that graphs are given
            more = max(0, running(config) - LEAST_RUNNING)
            room -= more * 2 * LOGIT_BYTES * machine.spec.vocab_size
        pages = min(room // page_bytes, most)
    if pages < tables:
        raise MemoryError("there is not enough memory for the model and a KV pool")
    if layout.window:
        log.info(
            "KV pool: %d tokens in all layers, or %d in contexts of %d beyond their windows",
            pages // tables * page_size,
            layout.tokens(pages, page_size, max_model_len),
            max_model_len,
        )
    return KVCacheManager(
        pages,
        page_size,
        running(config),
        prefix_cache=config.prefix_cache,
        snapshots=config.snapshots if machine.state_bytes else None,
        borders=config.snapshot_borders,
        window=layout.window,
        window_tables=layout.window_tables,
    )


def running(config: EngineConfig) -> int:
    """Return the most requests that run together, in settings that say it or are completed."""
    return config.max_running or LEAST_RUNNING


def with_running(config: EngineConfig, machine: Machine, max_model_len: int) -> EngineConfig:
    """Return the settings with the most requests that run together, where they do not say it: as
    many as a GPU's KV pool has room for, in whole steps of the rows of large decode steps. States
    of linear attention take that memory instead, and a CPU's cores are busy with few."""
    if config.max_running is not None:
        return config
    most = LEAST_RUNNING
    if machine.kind != "cpu" and machine.page_token_bytes and not machine.state_bytes:
        tokens = config.kv_tokens or machine.kv_bytes(max_model_len) // machine.page_token_bytes
        fitting = tokens // RUNNING_TOKENS // BUCKET_STEP * BUCKET_STEP
        most = max(LEAST_RUNNING, min(fitting, MOST_RUNNING))
    return msgspec.structs.replace(config, max_running=most)


def with_states(config: EngineConfig, machine: Machine, max_model_len: int) -> EngineConfig:
    """Return the settings with the number of snapshots, and with no more requests at a time than
    half of the room for the KV pool has states for, with a snapshot each if prefixes are reused.

    Raises:
        FieldError: too many snapshots are asked for, or any of a model without states.
        MemoryError: not even one fits.
    """
    if not machine.state_bytes:
        if config.snapshots is not None:
            raise FieldError("snapshots", f"are of states, which {config.model} has none of")
        return config
    each, room = machine.state_bytes, machine.kv_bytes(max_model_len)
    asked, states = config.snapshots or 0, room // 2 // each
    most = states // 2 if config.prefix_cache and not asked else states - asked
    if asked and most < 1:
        raise FieldError("snapshots", f"{asked} leave no room for states: it is that of {states}")
    if most < 1:
        raise MemoryError("there is not enough memory for the model and the states of a request")
    wanted = running(config)
    if most < wanted:
        log.warning(
            "max_running is %d, not %d: states of a request take %.1f MiB, and each snapshot does",
            most,
            wanted,
            each / 2**20,
        )
    together = min(most, wanted)
    if not asked and config.prefix_cache:
        asked = together
        if config.kv_tokens is None:
            left = room - together * each
            tokens = min(together * max_model_len, left // max(1, machine.page_token_bytes))
            most = tokens // SNAPSHOT_TOKENS
            asked = max(asked, min(most, int(SNAPSHOT_SHARE * left) // each))
    return msgspec.structs.replace(config, max_running=together, snapshots=asked)


def check_room(tokens: int, needed: int) -> None:
    """Refuse a KV pool whose bytes the free memory does not hold, before its pages are counted.

    Raises:
        FieldError: it takes more.
    """
    free = free_memory()
    if needed > free:
        sizes = f"take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        raise FieldError("kv_tokens", f"{tokens}: they {sizes}")


def _page_size(config: EngineConfig, machine: Machine) -> int:
    if config.page_size is None:
        # Tokens, where the device does not ask for another.
        return machine.page_sizes[0] if machine.page_sizes else 16
    if machine.page_sizes and config.page_size not in machine.page_sizes:
        served = ", ".join(map(str, sorted(machine.page_sizes)))
        raise FieldError("page_size", f"must be one of {served} here, not {config.page_size}")
    return config.page_size
