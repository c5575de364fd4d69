"""What grammars cost a batch: `python benchmarks/constraints.py --model qwen3-8b --out FILE`.

An engine with dummy weights decodes batches of one size side by side: none of their requests, or
some, are held to a JSON schema. The gaps between tokens are the engine's own, without pacing. Every
ratio is of two batches of this run. Then the parts of such a step by themselves: masks on the host
by rows and threads, and on a GPU what they take from the logits. `--model` may be a checkpoint;
then its own weights and tokenizer serve.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from twolane.engine.config import EngineConfig
from twolane.engine.constrained.constraints import Grammars, Masks
from twolane.engine.messages import Output, Progress, Submit, Vocabulary
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.structured.grammar import json_schema_grammar
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.tokenizer import ModelTokenizer, load_tokenizer
from twolane.lanes.cuda.logit_processors import LogitProcessors
from twolane.lanes.sampling_points import SamplingPoint
from twolane.lanes.slot_table import SlotTable
from twolane.lanes.work import Sampling, SlotUpdate, TokenMask
from twolane.model.load.hub import resolve
from twolane.results.provenance import provenance, save
from twolane.sampling import SamplingParams


def listed(name: dict[str, object]) -> dict[str, object]:
    """Return a schema of lists of objects with such a name, to which no answer ends by itself."""
    properties = {
        "name": name,
        "kind": {"enum": ["one", "two", "three"]},
        "sizes": {"type": "array", "items": {"type": "number"}},
    }
    entry = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "array", "items": entry, "minItems": 1000}


SCHEMAS = {
    "plain": listed({"type": "string"}),
    "bounded": listed({"type": "string", "maxLength": 40}),
}
"""Schemas by name. Masks take longest for a bound on the length of text: where little room is left,
each token of the vocabulary is checked."""


def request(place: int, prompt: int, tokens: int, vocab_size: int, grammar: str | None) -> Submit:
    params = SamplingParams(
        temperature=1.0, seed=place, max_tokens=tokens, grammar=grammar, ignore_eos=grammar is None
    )
    ids = [100 + (31 * place + i) % min(20_000, vocab_size - 100) for i in range(prompt)]
    return Submit(f"{time.monotonic_ns()}-{place}", ids, params)


async def gaps(client: EngineClient, submits: Sequence[Submit]) -> list[list[float]]:
    """Return seconds between the tokens of each request, from when all of them decode."""
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
    """Return median and P99 of all gaps, in milliseconds."""
    together = sorted(gap for each in found for gap in each)
    if not together:
        raise SystemExit("the requests never decoded all at once: give more --tokens")
    p99 = together[min(len(together) - 1, int(0.99 * len(together)))]
    return {"median_ms": 1e3 * statistics.median(together), "p99_ms": 1e3 * p99}


def told(step: Progress) -> None:
    """Print a step of the engine's start, which may take a minute on a GPU."""
    print(f"{time.strftime('%T')} {step.stage} {step.fraction:.2f}", flush=True)


async def measure(given: argparse.Namespace, vocabulary: Vocabulary) -> dict[str, object]:
    """Decode batches of one size, some of whose rows are constrained; the first of each round has
    none."""
    config = EngineConfig(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        system=given.system,
        levels=given.levels and tuple(given.levels),
        max_model_len=given.prompt + given.tokens + 16,
        prefix_cache=False,
        trace=given.trace,
    )
    client = await EngineClient.start(config, told)
    runs: dict[int, dict[str, list[dict[str, float]]]] = {}
    try:
        client.send_vocabulary(vocabulary)
        grammar, size = json_schema_grammar(SCHEMAS[given.schema]), given.vocab_size
        await gaps(client, [request(0, 16, 8, size, grammar), request(1, 16, 8, size, None)])
        for tied in [0, *given.constrained] * given.rounds:
            asked = [
                request(i, given.prompt, given.tokens, size, grammar if i < tied else None)
                for i in range(given.rows)
            ]
            found, run = await gaps(client, asked), runs.setdefault(tied, {})
            for name, part in (("constrained", found[:tied]), ("free", found[tied:])):
                if part:
                    run.setdefault(name, []).append(figures(part))
            print(tied, {name: each[-1] for name, each in run.items()}, flush=True)
    finally:
        await client.close()
    return {"gaps": shown(runs)}


def shown(runs: Mapping[int, Mapping[str, list[dict[str, float]]]]) -> dict[str, object]:
    """Return the medians of all rounds, and their ratios to the batch without constrained rows."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for tied, run in runs.items():
        for name, rounds in run.items():
            middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            base = middle if tied == 0 else found[0]["free"]
            over = {f"{key}_over_none": middle[key] / base[key] for key in base if "_ms" in key}
            found.setdefault(tied, {})[name] = {**middle, **(over if tied else {})}
    return {f"{tied} constrained": each for tied, each in found.items()}


def mask_costs(given: argparse.Namespace, vocabulary: Vocabulary) -> dict[str, object]:
    """Return milliseconds until the masks of a step are there, by rows and threads: median and P99
    of 100 steps."""
    grammar, costs = json_schema_grammar(SCHEMAS[given.schema]), {}
    for threads, rows in itertools.product(given.threads, (1, 16, 64)):
        computing = Masks(lambda: None, threads)
        ids = given.vocab_size, (given.eos,)
        grammars = Grammars(vocabulary, *ids, lambda: None, groups=2 * threads)
        tied = [grammars.constraint(grammar, {given.eos}).result()[0] for _ in range(rows)]
        seconds = []
        for step in range(100):
            begun = time.perf_counter()
            masks = computing.start(tied).result()
            seconds.append(time.perf_counter() - begun)
            for place, (each, mask) in enumerate(zip(tied, masks, strict=True)):
                each.take(chosen(mask, 7 * place + 3 * step))
        costs[f"{rows} rows, {threads} threads"] = figures([seconds])
    return {"masks": costs}


def chosen(mask: bytes, start: int) -> int:
    """Return an allowed token: the first after a position, so that rows differ."""
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, start % (8 * len(mask))) % len(allowed)])


def upload_costs(given: argparse.Namespace) -> dict[str, object]:
    """Return the milliseconds from a step's masks being known to the device having applied them to
    the logits: median and P99 of 50 steps."""
    device, vocab, costs = torch.device("cuda"), given.vocab_size, {}
    mask = bytes([0b10110101]) * -(-vocab // 8)
    for rows in (1, 16, 64):
        slots = SlotTable(rows)
        processors = LogitProcessors(slots, vocab, device)
        logits, seconds = torch.zeros(rows, vocab, device=device), []
        chosen_by = [Sampling(SamplingParams(), i, 1, ()) for i in range(rows)]
        slots.take([SlotUpdate(i, 0, (), each) for i, each in enumerate(chosen_by)])
        places = [SamplingPoint(i, i, 1) for i in range(rows)]
        for _ in range(50):
            began, ended = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda.synchronize()
            began.record()
            processors.constrain([TokenMask(i, mask) for i in range(rows)])
            processors.adjust(logits, places)
            ended.record()
            torch.cuda.synchronize()
            seconds.append(began.elapsed_time(ended) / 1e3)
        costs[f"{rows} rows"] = figures([seconds])
    return {"upload": costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--system", default="static-split")
    parser.add_argument("--levels", type=int, nargs="*", help="of the decode lane; few start soon")
    parser.add_argument("--schema", choices=SCHEMAS, default="bounded")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: the embedded one")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--eos", type=int, default=151_645, help="end token of the tokenizer")
    parser.add_argument("--rows", type=int, default=72, help="of each batch")
    parser.add_argument("--constrained", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", help="file for a trace of the engine's launches")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tokenizer = load_tokenizer(resolve("smollm2-135m-instruct"))
    if given.tokenizer is not None:
        tokenizer = ModelTokenizer(Tokenizer.from_file(str(given.tokenizer)), None, {})
    vocabulary = TextCodec(tokenizer).vocabulary()
    workload = {k: str(v) for k, v in vars(given).items() if k != "out"}
    found: dict[str, object] = {}
    for part in (lambda: asyncio.run(measure(given, vocabulary)), *parts_of(given, vocabulary)):
        found |= part()
        if given.out is not None:  # what was measured before a run is broken off is kept
            save(given.out, provenance(workload), found)
    for name, values in found.items():
        print(name, values)


def parts_of(
    given: argparse.Namespace, vocabulary: Vocabulary
) -> Sequence[Callable[[], dict[str, object]]]:
    """Return the measurements of a step's parts."""
    masks = partial(mask_costs, given, vocabulary)
    return (masks, partial(upload_costs, given)) if torch.cuda.is_available() else (masks,)


if __name__ == "__main__":
    main()
