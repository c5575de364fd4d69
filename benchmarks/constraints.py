"""What grammars cost a batch: `python benchmarks/constraints.py --model qwen3-8b --out FILE`.

An engine with dummy weights decodes requests side by side, none, half or all of them held to a
JSON schema. The gaps between tokens are the engine's own, without pacing. Every ratio is of two
loads of this run. `--model` may be a checkpoint; then its own weights and tokenizer serve.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from twolane.engine.config import EngineConfig
from twolane.engine.constrained.constraints import Grammars
from twolane.engine.messages import Output, Submit
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.structured.grammar import json_schema_grammar
from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import resolve
from twolane.results.provenance import provenance, save
from twolane.sampling import SamplingParams

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["one", "two", "three"]},
            "sizes": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["name", "kind", "sizes"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""An answer to it never ends by itself within the tokens that are asked for."""


def request(place: int, prompt: int, tokens: int, vocab_size: int, grammar: str | None) -> Submit:
    params = SamplingParams(
        temperature=1.0,
        seed=place,
        max_tokens=tokens,
        grammar=grammar,
        ignore_eos=grammar is None,
    )
    ids = [100 + (31 * place + i) % min(20_000, vocab_size - 100) for i in range(prompt)]
    return Submit(f"{time.monotonic_ns()}-{place}", ids, params)


async def gaps(client: EngineClient, submits: Sequence[Submit]) -> list[list[float]]:
    """Seconds between the tokens of each request, from when all of them decode."""
    times: list[list[float]] = [[] for _ in submits]
    ended = [asyncio.Event() for _ in submits]

    def sink_of(place: int):
        def sink(event):
            if not isinstance(event, Output):
                raise SystemExit(str(event))
            times[place] += [time.monotonic()] * len(event.tokens)
            if event.finish is not None:
                ended[place].set()

        return sink

    for place, submit in enumerate(submits):
        client.submit(submit, sink_of(place))
    await asyncio.gather(*[each.wait() for each in ended])
    all_decode = max(each[0] for each in times)
    some_ended = min(each[-1] for each in times)
    return [
        [b - a for a, b in itertools.pairwise(each) if a > all_decode and b <= some_ended]
        for each in times
    ]


def figures(found: Sequence[Sequence[float]]) -> dict[str, float]:
    """Median and P99 of all gaps, in milliseconds."""
    together = sorted(gap for each in found for gap in each)
    if not together:
        raise SystemExit("the requests never decoded all at once: give more --tokens")
    p99 = together[min(len(together) - 1, int(0.99 * len(together)))]
    return {"median_ms": 1e3 * statistics.median(together), "p99_ms": 1e3 * p99}


async def measure(given: argparse.Namespace, tokenizer: str) -> dict[str, object]:
    config = EngineConfig(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        system=given.system,
        max_model_len=given.prompt + given.tokens + 16,
        prefix_cache=False,
    )
    client = await EngineClient.start(config)
    try:
        client.teach(tokenizer)
        grammar, rows = json_schema_grammar(SCHEMA), given.rows
        loads = {"none": 0, "half": rows // 2, "all": rows}
        size = given.vocab_size
        await gaps(client, [request(0, 16, 8, size, grammar), request(1, 16, 8, size, None)])
        runs: dict[str, list[dict[str, float]]] = {}
        for name, tied in itertools.chain(*[loads.items()] * given.rounds):
            asked = [
                request(i, given.prompt, given.tokens, size, grammar if i < tied else None)
                for i in range(rows)
            ]
            found = await gaps(client, asked)
            if tied:
                runs.setdefault(f"{name}: constrained", []).append(figures(found[:tied]))
            if tied < rows:
                runs.setdefault(f"{name}: free", []).append(figures(found[tied:]))
    finally:
        await client.close()
    shown = {
        name: {key: statistics.median(run[key] for run in each) for key in each[0]}
        for name, each in runs.items()
    }
    free = shown["none: free"]["median_ms"]
    ratios = {name: each["median_ms"] / free for name, each in shown.items()}
    return {"gaps": shown, "over none": ratios}


def mask_cost(tokenizer: str, vocab_size: int, eos: int) -> dict[str, float]:
    """Milliseconds to compute the masks of 1, 16 and 64 rows, median of 50 steps."""
    grammars = Grammars(tokenizer, vocab_size, (eos,), lambda: None)
    grammar, costs = json_schema_grammar(SCHEMA), {}
    for rows in (1, 16, 64):
        tied = [grammars.constraint(grammar, {eos}).result()[0] for _ in range(rows)]
        seconds = []
        for step in range(50):
            begun = time.perf_counter()
            masks = [each.mask() for each in tied]
            seconds.append(time.perf_counter() - begun)
            for place, (each, mask) in enumerate(zip(tied, masks, strict=True)):
                each.take(chosen(mask, 7 * place + 3 * step))
        costs[str(rows)] = 1e3 * statistics.median(seconds)
    return costs


def chosen(mask: bytes, start: int) -> int:
    """A token that the mask allows: the first behind a place, so that rows differ."""
    bits = len(mask) * 8
    places = (token % bits for token in range(start, start + bits))
    return next(token for token in places if mask[token // 8] >> token % 8 & 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--system", default="static-split")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: the embedded one")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--eos", type=int, default=151_645, help="end token of the tokenizer")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.tokenizer is None:
        tokenizer = load_tokenizer(resolve("smollm2-135m-instruct")).backend.to_str()
    else:
        tokenizer = given.tokenizer.read_text()
    found = asyncio.run(measure(given, tokenizer))
    found["masks_ms"] = mask_cost(tokenizer, given.vocab_size, given.eos)
    for part, values in found.items():
        print(part, values)
    if given.out is not None:
        workload = {k: str(v) for k, v in vars(given).items() if k != "out"}
        save(given.out, provenance(workload), found)


if __name__ == "__main__":
    main()
