"""Another engine compared with `auto` on one GPU: `python benchmarks/peers.py --command "vllm serve
M"`.

`--command` starts any server with OpenAI's API. In this order, on one card: `auto` at every bound;
the other engine with each value of `--sweep`, once, for one server serves all bounds; again, with
finer steps, the value that was best at each bound; `auto` again. Both get the same client, token
ids, patterns of arrivals and tokenizer (give both the same model folder). The file has, for each
bound, the value that won, what it held and what `auto` held, and beside the gaps that the client
saw those that each engine counted: what a server's HTTP costs is not its scheduling.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from searches import WARMUPS, Bounds, Found, search, searched

from twolane.bench import goodput
from twolane.bench.target import Target
from twolane.results.provenance import provenance, save
from twolane.results.result import BenchConfig
from twolane.workload.prompts import TokenRange
from twolane.workload.spec import WorkloadSpec

COARSE, FINE = 0.2, 0.06
"""Relative distances between the rate that fails and the one that holds."""
BUDGETS = "max-num-batched-tokens=128,192,256,384,512,1024"
"""Flag of vLLM that trades TTFT against TBT."""


class Row(msgspec.Struct):
    """Results at one bound on TBT."""

    tbt_ms: float
    best: str
    """Server with the setting that won."""
    peer: Found
    auto_before: Found
    auto_after: Found

    @property
    def ratio(self) -> float | None:
        """Goodput of `auto`, before and after, over the peer's; None where the peer held none."""
        own = statistics.median([*self.auto_before.goodput, *self.auto_after.goodput])
        return own / self.peer.median if self.peer.median else None


def best(found: Sequence[Found], tbt: float) -> Found:
    """Return the setting with the highest median at a bound; of equals the first."""
    return max((one for one in found if one.tbt == tbt), key=lambda one: one.median)


def compare(given: argparse.Namespace) -> tuple[list[Row], list[Found]]:
    """Search in turn; return the rows by bound, and the results of the sweep."""
    tbts = tuple(tbt / 1e3 for tbt in given.tbt)
    workload = WorkloadSpec(
        dataset=given.dataset, num_prompts=given.prompts, max_input_len=given.longest
    )
    bounds = Bounds(tbts, given.ttft / 1e3)
    load = BenchConfig(num_warmups=WARMUPS, vocab_range=given.vocab_range)
    peer = Target(serve_command=given.command, sweep=(given.sweep,), model=given.model)
    own = {"serve": given.own}

    def auto(turn: str) -> dict[float, Found]:
        asked = search(own, workload, bounds, given.start, given.seeds, FINE)
        return {one.tbt: one for one in searched(asked, ["auto"], given.work / turn, load)}

    before = auto("auto-before")
    asked = search(peer.words(), workload, bounds, given.start, 1, COARSE)
    swept = searched(asked, peer.contenders, given.work / "sweep", load)
    rows = {}
    for tbt in sorted(tbts):
        won = best(swept, tbt)
        near = search(
            peer.words(),
            workload,
            Bounds((tbt,), given.ttft / 1e3),
            won.median or given.start,
            given.seeds,
            FINE,
        )
        folder = given.work / f"best-{tbt * 1e3:g}ms"
        [rows[tbt]] = searched(near, [won.system], folder, load) if won.median else [won]
    after = auto("auto-after")
    return [
        Row(tbt * 1e3, rows[tbt].system, rows[tbt], before[tbt], after[tbt]) for tbt in rows
    ], swept


def shown(row: Row) -> str:
    """Return a line for the terminal."""
    ratio = "none held" if row.ratio is None else f"{row.ratio:.2f}"
    engine = row.peer.engine_itl_ms or {}
    gaps = f"P99 gap {row.peer.client_p99_ms} ms at the client"
    if engine:
        gaps += f", {engine['p99_above']} to {engine['p99_within']} ms in its engine"
    held = f"{row.auto_before.median:.1f} and {row.auto_after.median:.1f}"
    return f"{row.tbt_ms:g} ms: auto {held}, {row.best} {row.peer.median:.1f}: {ratio} ({gaps})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--command", required=True, help="command of the other server, see bench goodput")
    add("--own", required=True, help="model and flags of `twolane serve`")
    add("--name", required=True, help="name of the other engine in the files")
    add("--card", required=True, help="name of the GPU in the files")
    add("--sweep", default=BUDGETS, help="flag of the other server with its values")
    add("--model", help="model to name in requests; by default the server's first")
    add("--tbt", nargs="+", type=float, default=[9, 12, 21, 50], help="bounds in ms")
    add("--ttft", type=float, default=1000, help="bound in ms, beside 1 s per 1,024 new tokens")
    add("--dataset", default="azure-conv")
    add("--prompts", type=int, default=600, help="requests in a run")
    add("--longest", type=int, default=12_000, help="tokens to which prompts are cut")
    add("--start", type=float, default=16.0, help="requests/s where the searches begin")
    add("--vocab-range", type=TokenRange.parse, default=TokenRange(), metavar="LOW:HIGH",
        help="token ids to draw prompts from")  # fmt: skip
    add("--seeds", type=int, default=2, help="patterns of arrivals")
    add("--work", type=Path, default=Path("peers-work"), help="folder of the runs")
    add("--out", type=Path, default=Path(__file__).parent / "results" / "peers", help="folder")
    return parser.parse_args()


def main() -> None:
    """Compare, write the file, print a line a bound."""
    given = _options()
    begun = time.monotonic()
    rows, swept = compare(given)
    about = provenance(
        {
            "dataset": given.dataset,
            "prompts": given.prompts,
            "seeds": given.seeds,
            "ttft_ms": given.ttft,
        }
    )
    content = {
        "peer": given.name,
        "card": given.card,
        "seconds": time.monotonic() - begun,
        "rows": [{**msgspec.to_builtins(row), "ratio": row.ratio} for row in rows],
        "sweep": swept,
    }
    name = goodput.file_name(f"{given.name}-{given.dataset}-{given.card}")
    save(given.out / f"{name}.json", about, content)
    for row in rows:
        print(shown(row))


if __name__ == "__main__":
    main()
