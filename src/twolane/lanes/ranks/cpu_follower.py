"""A rank other than 0 on a CPU: `python -m twolane.lanes.ranks.cpu_follower`."""

import os
import sys
import traceback
from typing import NoReturn

import torch

from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.ranks import log_reader
from twolane.lanes.ranks.followers import FollowerStart
from twolane.lanes.settings import load_shard
from twolane.lanes.work import AdapterRecord, DropRecord, LaunchRecord, Record
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.model.lora import AdapterPool
from twolane.parallel.group import CpuGroup, RankLost, meeting_at


def fail(error: BaseException) -> NoReturn:
    """End the process with its first error: the ranks have parted ways."""
    if isinstance(error, RankLost):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)
    os._exit(1)


def carry_out(lanes: CpuLanes, record: Record) -> None:
    """Carry out a record of the log.

    Raises:
        ValueError: it is not what comes next.
    """
    if isinstance(record, LaunchRecord):
        ticket = lanes.launch(record.lane, record.units, record.work, record.after)
        if ticket.number != record.number:
            raise ValueError(f"the log has launch {record.number} where {ticket.number} is due")
    elif isinstance(record, DropRecord):
        lanes.drop(record.batch)


def follow(runner: Runner, start: FollowerStart) -> NoReturn:
    """Carry out the log on this process's lanes, and end the process where the log ends."""
    lanes, reports = CpuLanes(runner, start.cores, lambda: None), log_reader.AdapterReports(start)
    lanes.explain = fail
    for record in log_reader.read_log(start.answers):
        if isinstance(record, AdapterRecord):
            reports.load(record, lanes)
        else:
            carry_out(lanes, record)
    os._exit(0)  # without what is queued: nobody waits for it


def main() -> None:
    """Follow until the log ends."""
    start = log_reader.read_start()
    torch.set_num_threads(1)  # for loading, beside the other ranks; each lane sets its own
    settings = start.settings
    with log_reader.reporting_failure(start):
        spec, weights = load_shard(settings, "cpu", lambda *_: None, start.rank)
    store = meeting_at(start.port)
    decoder = Decoder(spec, weights, CpuGroup(start.rank, settings.tensor_parallel_size, store))
    sizes = log_reader.read_sizes()
    rounded = settings.kv_cache_dtype == "fp8"
    shape = decoder.spec, sizes.pages, sizes.page_size, decoder.dtype
    states, layout = sizes.slots + sizes.snapshots, sizes.layout(decoder.spec)
    kv = KVCache(*shape, requests=states, rounded=rounded, layout=layout)
    adapters = AdapterPool(weights, settings.adapter_slots, settings.max_lora_rank)
    follow(Runner(decoder, kv, sizes.slots, adapters), start)


if __name__ == "__main__":
    main()
