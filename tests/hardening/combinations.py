"""Requests with features drawn together, all at once, against the same requests one by one.

A program of its own: `python -m tests.hardening.combinations --seconds N [--seed S]`. Each round
draws requests, has them answered one by one by a server with its defaults, whose prefix cache is
emptied before each, and all together by a server with other settings. In float32 the answers are
the same. With keys and values in FP8, a difference in the last bits may become one of an eighth of
a number: there, greedy answers may part where the reference's two best tokens are near each other,
as `tests.parity.judge` finds. A line tells of each round, and of each answer that differs with the
seed of its request; the last line is a summary in JSON.
"""

import argparse
import copy
import importlib.util
import json
import math
import random
import socket
import sys
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..model.adapters import make_adapter
from ..model.checkpoints import VOCAB, make_checkpoint
from ..model.quantised_checkpoints import write
from ..parity.judge import Judge
from ..server.serving import PATIENCE, Served, serving
from .checkpoint import add_text

Json = dict[str, Any]
Server = Callable[..., AbstractContextManager[Served]]
NEAR = 1e-3
"""Largest difference of two log-probabilities that are the same."""
TOLD = 20
"""Most log-probabilities that a server tells of a token."""
AT_ONCE = 12
REQUESTS = 40
"""Requests of a round."""
WORDS = (
    "the cat",
    "a lane",
    "on the road",
    "12 trains",
    "über Straße",
    "日本",
    "x = 1",
    "\n",
    "🙂",
)
SHARED = ("You are a careful assistant of the road office. ", "aaaa bbbb cccc dddd eeee ffff gggg ")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMATS: Sequence[Json] = (
    {"structured_outputs": {"regex": "[a-c]{2,9}"}},
    {"structured_outputs": {"choice": ["north", "south", "southwest"]}},
    {"guided_json": SCHEMA},
    {"ebnf": 'root ::= "(" root ")" | [0-9]+'},
    {"response_format": {"type": "json_object", "value": SCHEMA}},
)
APART = ("n", "prompt", "stream", "stream_options", "cache_salt")
"""Fields by which the requests of the reference differ: they ask for one answer each, at once."""


class Setting(NamedTuple):
    """A server whose answers are compared, and the model of both servers."""

    model: str
    options: Sequence[str] = ()
    fleet: bool = False
    adapters: bool = False
    rounded: bool = False
    """Whether both servers keep keys and values in FP8."""


SHORT = ("--kv-tokens", "1152")
SETTINGS: Mapping[str, Setting] = {
    "muxwise": Setting("llama2", ("--system", "muxwise", *SHORT), adapters=True),
    "fleet": Setting("llama2", ("--replicas", "2"), fleet=True),
    "gptq": Setting("gptq", ("--system", "chunked", *SHORT)),
    "one page": Setting("llama2", ("--page-size", "1024", "--kv-tokens", "1024")),
    "slices": Setting("llama2", ("--system", "bullet", "--page-size", "3", *SHORT), adapters=True),
    "1P1D": Setting("llama2", ("--disaggregated", *SHORT)),
    "ranks": Setting("llama2", ("--tensor-parallel-size", "2", *SHORT)),
    "windows": Setting("mistral", ("--system", "drift", *SHORT)),
    "experts": Setting("qwen3-moe", ("--system", "duetserve", *SHORT)),
    "no cache": Setting("qwen3", ("--no-prefix-cache", "--max-running", "5", *SHORT)),
    "hybrid windows": Setting("gemma3", ("--system", "muxwise", *SHORT)),
    "windows 1P1D": Setting("gpt-oss", ("--disaggregated", *SHORT)),
    "inputs 1P1D": Setting("gemma4-inputs", ("--disaggregated", *SHORT)),
    "windows of ranks": Setting("olmo3", ("--tensor-parallel-size", "2", *SHORT)),
    "states": Setting("qwen3-next", ("--system", "bullet", *SHORT)),
    "fp8": Setting("llama2", ("--system", "muxwise", *SHORT), adapters=True, rounded=True),
    "fp8 windows": Setting("mistral", ("--system", "bullet", *SHORT), rounded=True),
}
CHOOSING = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "min_tokens", "ignore_eos", "seed", "top_k", "echo", "prompt_logprobs"),
    *(name for form in FORMATS for name in form),
)
"""Fields by which a token is not the model's best one, or that show what is rounded."""
SURE = 0.1
"""Where the two best log-probabilities of rounded keys and values are nearer than this, either
token is right."""


class Asked(NamedTuple):
    """A request."""

    seed: int
    path: str
    body: Json
    leaves: float | None
    """Seconds after which its client leaves; None: it stays."""


def text(r: random.Random) -> str:
    words = " ".join(r.choice(WORDS) for _ in range(r.choice((1, 3, 14, 60))))
    return r.choice((*SHARED, "")) + words


def ids(r: random.Random) -> list[int]:
    start = random.Random(r.randrange(6))
    count = r.choice((1, 5, 33, 130, 300))
    return [start.randrange(3, 240) for _ in range(count - 1)] + [r.randrange(3, 240)]


def prompt_of(r: random.Random) -> Any:
    kinds = (text, ids, lambda r: [text(r) for _ in range(2)], lambda r: [ids(r) for _ in range(3)])
    return r.choice(kinds)(r)


SAMPLED: Mapping[str, tuple[float, Callable[[random.Random], Any]]] = {
    "repetition_penalty": (0.15, lambda r: r.choice((0.8, 1.3))),
    "presence_penalty": (0.1, lambda r: r.choice((-1.0, 1.5))),
    "frequency_penalty": (0.1, lambda r: r.choice((-0.5, 1.5))),
    "logit_bias": (0.15, lambda r: {str(r.randrange(240)): r.choice((-100, 3, 6))}),
    "stop": (0.2, lambda r: [r.choice("abcdeXYZ .,:") for _ in range(r.choice((1, 8)))]),
    "stop_token_ids": (0.15, lambda r: [r.randrange(240) for _ in range(r.choice((1, 12)))]),
    "min_tokens": (0.1, lambda r: r.choice((1, 5))),
    "ignore_eos": (0.1, lambda r: True),
    "include_stop_str_in_output": (0.1, lambda r: True),
    "skip_special_tokens": (0.1, lambda r: False),
    "bad_words": (0.1, lambda r: [r.choice(("a", " the", "12", "é"))]),
    "allowed_token_ids": (0.08, lambda r: sorted({r.randrange(3, 240) for _ in range(30)})),
    "truncate_prompt_tokens": (0.1, lambda r: r.choice((-1, 1, 7, 40))),
    "return_tokens_as_token_ids": (0.1, lambda r: True),
    "n": (0.25, lambda r: r.choice((2, 3, 5))),
    "cache_salt": (0.2, lambda r: r.choice(("s1", "s2"))),
    "stream": (0.35, lambda r: True),
}
"""Chance and value of each field of both endpoints."""


def draw(seed: int, setting: Setting) -> Asked:
    """Return the request of a seed."""
    asked = drawn(seed, setting.adapters)
    if not setting.rounded:
        return asked
    body = {name: value for name, value in asked.body.items() if name not in CHOOSING}
    return asked._replace(body={**body, "temperature": 0})


def drawn(seed: int, adapters: bool) -> Asked:
    r = random.Random(seed)
    chat = r.random() < 0.4
    body: Json = {"model": "m", "return_token_ids": True, "max_tokens": r.choice((1, 4, 12, 40))}
    if chat:
        turns = [text(r) for _ in range(r.choice((1, 1, 3)))]
        roles = ("user", "assistant")
        body["messages"] = [
            {"role": roles[place % 2], "content": said} for place, said in enumerate(turns)
        ]
    else:
        body["prompt"] = prompt_of(r)
    body |= {name: make(r) for name, (chance, make) in SAMPLED.items() if r.random() < chance}
    body["temperature"] = 0
    if r.random() < 0.35:
        body |= {"temperature": r.choice((0.5, 1.7)), "seed": r.randrange(9), "top_k": 40}
    if r.random() < 0.15:
        body |= r.choice(FORMATS)
    if r.random() < 0.25:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": r.choice((0, 3))}
    if not chat and r.random() < 0.15:
        body |= r.choice(({"echo": True}, {"max_tokens": None}))
    if not body.get("stream") and r.random() < 0.1:
        body["prompt_logprobs"] = r.choice((0, 2))
    if adapters and r.random() < 0.4:
        body["model"] = r.choice(("a", "b"))
    leaves = r.choice((0.0, 0.01, 0.1)) if r.random() < 0.08 else None
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Asked(seed, path, body, leaves)


def apart(asked: Asked) -> Iterator[Asked]:
    """Yield the requests of each answer alone."""
    body = {name: value for name, value in asked.body.items() if name not in APART}
    prompt = asked.body.get("prompt")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    for one in prompt if several else [prompt]:
        for place in range(asked.body.get("n") or 1):
            own = copy.deepcopy(body) | ({} if prompt is None else {"prompt": one})
            if "seed" in own:
                own["seed"] += place
            yield asked._replace(body=own, leaves=None)


def ask(served: Served, asked: Asked) -> Json | None:
    """Return the answer as one object with `choices`, or its error; None: the client left."""
    address = urllib.parse.urlsplit(served.base)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", asked.path, json.dumps(asked.body), headers)
        if asked.leaves is not None:
            time.sleep(asked.leaves)
            connection.sock.shutdown(socket.SHUT_RDWR)
            return None
        answer = connection.getresponse()
        data = answer.read()
        streamed = answer.status == 200 and asked.body.get("stream")
        return joined(data.decode()) if streamed else json.loads(data)
    finally:
        connection.close()


def joined(stream: str) -> Json:
    """Return the answer that the events of a stream add up to."""
    choices: dict[int, Json] = {}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event.get("error"):
            return event
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "token_ids": []})
            whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            whole["token_ids"] += choice.get("token_ids") or []
            for name, values in (choice.get("logprobs") or {}).items():
                if values is not None:
                    known = whole.setdefault("logprobs", {})
                    known[name] = known.get(name, []) + values
            for name in ("finish_reason", "stop_reason"):
                if choice.get(name) is not None:
                    whole[name] = choice[name]
    return {"choices": [choices[index] for index in sorted(choices)]}


def said(choice: Json) -> Json:
    """Return what an answer says, alike for whole and streamed ones of both endpoints."""
    message = choice.get("message") or {}
    logprobs = {name: values for name, values in (choice.get("logprobs") or {}).items() if values}
    return {
        "text": choice.get("text") or message.get("content") or "",
        "token_ids": choice.get("token_ids"),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
        "logprobs": logprobs or None,
        "prompt_logprobs": choice.get("prompt_logprobs"),
    }


def near(first: Any, second: Any, most: float) -> bool:
    """Return whether two values are the same, numbers up to a difference."""
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= most
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(near(first[k], second[k], most) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(near(*pair, most) for pair in pairs)
    return bool(first == second)


def difference(
    asked: Asked, alone: Sequence[Json | None], found: Json | None, setting: Setting
) -> str | None:
    """Return how an answer differs from those of its parts; None: it does not."""
    if found is None:
        return None
    refusals = [one["error"] for one in alone if one is not None and "error" in one]
    if "error" in found:
        error = found["error"]
        root = str(error.get("param")).split(".")[0].split("[")[0]
        if root not in asked.body:
            return f"its refusal names no field of the request: {error}"
        return None if refusals or root in APART else f"it is refused: {error}"
    if refusals:
        return f"it is answered, and its parts are refused: {refusals[0]}"
    wanted = [said(one["choices"][0]) for one in alone if one is not None]
    given = [said(choice) for choice in found["choices"]]
    for place, (want, got) in enumerate(zip(wanted, given, strict=True)):
        for name in want:
            if not near(want[name], got[name], SURE if setting.rounded else NEAR):
                return f"{name} of answer {place}: {want[name]!r:.200} alone, {got[name]!r:.200}"
    return None


class Told:
    """The model of a `Judge`: a server that tells the log-probabilities of tokens.

    Args:
        served: the server.
        model: the name of the model or adapter.
    """

    def __init__(self, served: Served, model: str) -> None:
        self._ask = partial(served.request, "/v1/completions")
        self._body = {"model": model, "max_tokens": 1, "temperature": 0, "ignore_eos": True}

    def __call__(self, whole: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
        """Return the logits after the last tokens, as `transformers` does."""
        more = {"prompt_logprobs": TOLD, "logprobs": TOLD, "return_tokens_as_token_ids": True}
        status, _, answer = self._ask({**self._body, **more, "prompt": whole[0].tolist()})
        assert status == 200, answer
        [choice] = answer["choices"]
        last = choice["logprobs"]["top_logprobs"][0]
        logits = torch.full((1, logits_to_keep, VOCAB), -math.inf)
        told = [*choice["prompt_logprobs"][1:], last][-logits_to_keep:]
        for row, each in zip(logits[0], told, strict=True):
            for token, value in each.items():
                row[int(token.removeprefix("token_id:"))] = (
                    value if each is last else value["logprob"]
                )
        return SimpleNamespace(logits=logits)


def near_tie(
    reference: Served, asked: Asked, alone: Sequence[Json | None], found: Json | None
) -> int | None:
    """Return how many tokens of a greedy answer, which has others than it has alone, are not the
    best of several that are near each other; None: one is not the best where the reference is sure,
    or it is not tokens that differ."""
    parts = [one for one in alone if one is not None and "choices" in one]
    if found is None or "choices" not in found or len(parts) != len(found["choices"]):
        return None
    given = [choice["token_ids"] for choice in found["choices"]]
    if given == [part["choices"][0]["token_ids"] for part in parts]:
        return None
    judge, count = Judge(Told(reference, asked.body["model"]), SURE), 0
    for part, tokens in zip(parts, given, strict=True):
        prompt = part.get("prompt_token_ids") or part["choices"][0]["prompt_token_ids"]
        try:
            count += judge.forgiven(prompt, tokens)
        except AssertionError as error:
            print(f"  {error}", flush=True)
            return None
    return count


def round_of(served: Served, reference: Served, seed: int, setting: Setting) -> list[str]:
    """Return the differences of a round."""
    asked = [draw(seed + place, setting) for place in range(REQUESTS)]
    alone = [[one_by_one(reference, part) for part in apart(each)] for each in asked]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(lambda each: ask(served, each), asked))
    lines = []
    for each, parts, found in zip(asked, alone, together, strict=True):
        if (text := difference(each, parts, found, setting)) is None:
            continue
        if setting.rounded:
            count = near_tie(reference, each, parts, found)
            if count is not None:
                print(f"  seed {each.seed}: parts at a near-tie, {count} tokens", flush=True)
                continue
        lines.append(f"seed {each.seed}, {each.path}: {text}")
    return lines


def one_by_one(served: Served, asked: Asked) -> Json | None:
    served.request("/reset_prefix_cache", data=b"")
    return ask(served, asked)


def make_models(folder: Path) -> None:
    """Write the models of all settings, and two adapters."""
    for family in {each.model for each in SETTINGS.values()} - {"gptq"}:
        add_text(make_checkpoint(family, folder / family))
    write(folder / "gptq", folder / "floats", "gptq")
    add_text(folder / "gptq")
    for seed, name in enumerate("ab", 1):
        make_adapter(folder / "llama2", folder / "lora" / name, seed=seed, rank=4 * seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="names of rounds, by commas; all by default")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    names = [name for name, each in SETTINGS.items() if not each.fleet or HAS_FLEET]
    names = options.kinds.split(",") if options.kinds else names
    rounds, differ = Counter[str](), 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_models(folder)
        adapters = [word for name in "ab" for word in ("--lora", f"{name}={folder}/lora/{name}")]
        while time.monotonic() < ends:
            name = names[(options.seed + rounds.total()) % len(names)]
            setting = SETTINGS[name]
            common = [str(folder / setting.model), "--served-model-name", "m"]
            common += adapters if setting.adapters else []
            common += ["--kv-cache-dtype", "fp8"] if setting.rounded else []
            start: Server = serving
            if setting.fleet:
                from ..fleet.test_fleet import fleet as start
            with (
                serving(*common, "--admin-endpoints") as reference,
                start(*common, *setting.options) as served,
            ):
                seed = (options.seed * 1000 + rounds.total()) * REQUESTS
                found = round_of(served, reference, seed, setting)
            rounds[name] += 1
            differ += len(found)
            print(f"{name}: {REQUESTS} requests from {seed} on, {len(found)} differ", flush=True)
            print(*(f"  {line}\n" for line in found), sep="", end="", flush=True)
    done = {"requests": rounds.total() * REQUESTS, "differ": differ, "rounds": rounds}
    print(json.dumps({"seed": options.seed, **done}), flush=True)
    return int(differ > 0)


HAS_FLEET = importlib.util.find_spec("aiohttp") is not None

if __name__ == "__main__":
    sys.exit(main())
