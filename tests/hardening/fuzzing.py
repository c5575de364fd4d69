"""Fuzz targets: what reads clients' and checkpoints' data, on mutations of a small corpus.

A program of its own, so that what ends a process is found, too: `python -m
tests.hardening.fuzzing --count N [--seed S] [TARGET ...]` runs input number 0 to N of each target
and writes a line for each fault. Inputs depend on target, seed and number alone.
"""

import argparse
import copy
import json
import logging
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from twolane.frontend.sandboxed import limit_memory

CORPUS = Path(__file__).parent / "corpus"
MEMORY = 3 << 30
"""Bytes of memory that the process may take; beyond, an input fails."""
SECONDS = 5.0
"""An input that takes longer is a fault, or is ended where there is a sandbox."""
INPUTS_EACH = 200
"""A process in the sandbox runs this many inputs at most."""
ANSWER_BYTES = 1000
"""An outcome is cut to this many bytes."""
PIECES = (
    *(b"null", b"true", b"-1", b"0", b"1e400", b"1e-400", b"-0", b"NaN", b"9" * 30, b"2.5"),
    *(b"18446744073709551616", b"[" * 50, b"{", b"}", b"]", b'"', b",", b":", b"\\u0000"),
    *(b"\\ud800", b"\\", b"\x00", b"\xff\xfe", "é😀\u202e\ufffd".encode(), b" " * 100, b"\n"),
    *(b"{}", b"[]", b'""', b"a" * 300, b"{{", b"}}", b"{%", b"%}", b"{% for x in messages %}"),
    *(b"{% endfor %}", b"{% if 1 %}", b"{% endif %}", b"messages", b"|tojson", b".__class__"),
    *(b"|map(attribute='x')", b"[0]", b"*9**9", b"range(9**9)", b"namespace()", b"(?="),
    *(b'"$ref":"#"', b'"anyOf":[', b'"pattern":"(a+)+$"', b'"minItems":99999', b'"enum":[]'),
    *(b'"maxLength":99999', b"{999}", b"\\p{L}", b"(a|b)*", b"[^", b"start: ", b"%json"),
    *(b"\xff" * 8, b"\x00" * 8, b"\x7f" * 8),
)
"""What is put into inputs, beside parts of the corpus."""


FILES = b"\n====\n"
"""What stands between the files of an input."""
VALUES = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        2**64,
        10**30,
        0.5,
        -1e308,
        1e-320,
        "",
        "a",
        "\x00",
    ),
    *("a" * 300, "é😀\u202e", "(a+)+$", [], {}, [[]], [None], [0] * 300, {"a": 1}, {"": {}}),
)
"""What JSON values are replaced with, beside other parts of the same document."""


def rewritten(document: object, draw: random.Random) -> bytes:
    """Return a JSON document in which one to three values are replaced, doubled or left out."""
    for _ in range(draw.randint(1, 3)):
        places: list[tuple[list | dict, int | str]] = []
        left = [document]
        while left:
            value = left.pop()
            if isinstance(value, dict | list):
                keys = list(value) if isinstance(value, dict) else list(range(len(value)))
                places += [(value, key) for key in keys]
                left += [value[key] for key in keys]
        if not places:
            break
        holder, key = draw.choice(places)
        other, place = draw.choice(places)
        match draw.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, json.loads(json.dumps(holder[key])))
            case 2:
                holder[key] = json.loads(json.dumps(other[place]))
            case _:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
    return json.dumps(document, ensure_ascii=draw.random() < 0.5).encode(errors="replace")


def mutated(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """Return data with a few changes: of JSON, half of the time changes that leave it JSON."""
    whole, mark, more = data.partition(FILES)
    if draw.random() < 0.5:
        try:
            return rewritten(json.loads(whole), draw) + mark + more
        except (ValueError, RecursionError):
            pass
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randint(0, len(made))
        end = min(len(made), at + int(draw.expovariate(1 / 8)) + 1)
        match draw.randrange(7):
            case 0 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 1:
                del made[at:end]
            case 2:
                made[at:at] = draw.choice(PIECES)
            case 3:
                made[at:end] = draw.choice(PIECES)
            case 4:
                made[at:at] = made[at:end] * draw.choice((1, 2, 50))
            case 5:
                other = draw.choice(others)
                begin = draw.randint(0, len(other))
                made[at:end] = other[begin : begin + draw.randint(1, 64)]
            case 6:
                del made[draw.randint(len(made) // 2, len(made)) :]
    return bytes(made)


class Target:
    """One thing that reads foreign data."""

    refusals: tuple[type[BaseException], ...] = ()
    """What it may raise."""
    sandboxed = False
    """Whether it runs in a sandbox, where it may also end its process or take too long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where it may write files."""

    def run(self, data: bytes) -> None:
        """Read one input."""
        raise NotImplementedError


class Json(Target):
    """The parser of bodies, and the faster one: both agree on what the first takes."""

    def __init__(self, folder: Path) -> None:
        from twolane.server.http import strict_json
        from twolane.server.http.errors import ApiError

        super().__init__(folder)
        self.refusals = (ApiError,)
        self._parser = strict_json

    def run(self, data: bytes) -> None:
        once = self._parser.parse(data)
        assert self._parser.parse_again(data) == once


class Bodies(Target):
    """The models of all endpoints, as the worker that checks bodies reads them; it never raises."""

    def __init__(self, folder: Path) -> None:
        from twolane.server.app import create_app  # noqa: F401  # all models are there
        from twolane.server.http.body_check_worker import check

        super().__init__(folder)
        self._check = check
        openai, anthropic = "twolane.server.openai.", "twolane.server.anthropic."
        self._models = [
            *(f"{openai}protocol:{name}" for name in ("CompletionRequest", "ChatRequest")),
            *(f"{openai}protocol:{name}" for name in ("TokenizeRequest", "DetokenizeRequest")),
            "twolane.server.responses.request:ResponsesRequest",
            f"{anthropic}request:MessagesRequest",
        ]

    def run(self, data: bytes) -> None:
        for model in self._models:
            refused = self._check(model.encode() + b"\n" + data)
            assert refused is None or (400 <= refused.status < 500 and refused.message)


class Templates(Target):
    """Chat templates, as a worker of the sandbox runs them."""

    sandboxed = True

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        from twolane.frontend.text.codec import TextCodec, TextError
        from twolane.frontend.text.tokenizer import ModelTokenizer

        super().__init__(folder)
        backend = Tokenizer.from_file(str(CORPUS / "tokenizers" / "metaspace.txt"))
        self.refusals = (TextError, MemoryError)
        self._codec = lambda source: TextCodec(
            ModelTokenizer(backend, source, {"bos_token": "<s>"})
        )

    def run(self, data: bytes) -> None:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        codec = self._codec(data.decode(errors="replace"))
        codec.chat(turns, variables={})


class Gguf(Target):
    """GGUF files: the model's shape and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        from twolane.frontend.text.gguf_tokenizer import from_gguf
        from twolane.model.load.gguf import GGUFModel

        super().__init__(folder)
        self.refusals = (ValueError,)
        self._readers: tuple[Callable[[Path], object], ...] = (GGUFModel, from_gguf)

    def run(self, data: bytes) -> None:
        file = self.folder / "fuzzed.gguf"
        file.write_bytes(data)
        both_read(self._readers, file)


class Configs(Target):
    """config.json and generation_config.json."""

    def __init__(self, folder: Path) -> None:
        from twolane.model.load.configs import facts_from_directory, sampling_from_directory

        super().__init__(folder)
        self.refusals = (ValueError,)
        self._readers = (facts_from_directory, sampling_from_directory)

    def run(self, data: bytes) -> None:
        for name in ("config.json", "generation_config.json"):
            (self.folder / name).write_bytes(data)
        both_read(self._readers, self.folder)


def both_read(readers: tuple[Callable[[Path], object], ...], path: Path) -> None:
    """Let two readers read; raise if both refuse."""
    errors = []
    for read in readers:
        try:
            read(path)
        except ValueError as error:
            errors.append(error)
    if len(errors) == 2:
        raise errors[0]


class Tokenizers(Target):
    """tokenizer.json, tokenizer_config.json and texts, as a worker of the sandbox reads them."""

    sandboxed = True

    def __init__(self, folder: Path) -> None:
        from twolane.frontend.text.codec import TextCodec, TextError
        from twolane.frontend.text.convert import convert
        from twolane.frontend.text.tokenizer import read_file

        super().__init__(folder)
        self.refusals = (ValueError, TextError, MemoryError)
        self._convert, self._read_file, self._codec = convert, read_file, TextCodec

    def run(self, data: bytes) -> None:
        whole, _, config = data.partition(FILES)
        (self.folder / "tokenizer.json").write_bytes(whole)
        (self.folder / "tokenizer_config.json").write_bytes(config or b"{}")
        import msgspec

        try:
            converted = msgspec.json.encode(self._convert(self.folder))
        except Exception as error:  # as its program says in a line, whatever it is
            raise ValueError(str(error)) from error
        _, tokenizer = self._read_file(converted)
        codec = self._codec(tokenizer)
        tokens = codec.encode("Hello, wörld! 😀 aaaaaaaaaaaaaaaaaaaaaaaaaaaab \x00")
        decoder = codec.detokenizer(tokens[:3])
        for token in (*tokens, 0, 5, 1 << 20):
            decoder.step(token)
        decoder.flush()


class Schemas(Target):
    """JSON schemas, regular expressions and grammars that requests bring."""

    def __init__(self, folder: Path) -> None:
        from twolane.common.errors import FieldError
        from twolane.frontend.structured import grammar

        super().__init__(folder)
        self.refusals = (FieldError,)
        self._grammars = grammar

    def run(self, data: bytes) -> None:
        made = self._grammars
        text = data.decode(errors="replace")
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            schema = None
        if isinstance(schema, dict):
            made.made_grammar(lambda: made.json_schema_grammar(schema), "response_format")
        elif text.startswith("start"):
            made.made_grammar(lambda: made.context_free_grammar(text), "structured_outputs")
        else:
            made.made_grammar(lambda: made.regex_grammar(text), "structured_outputs")


TARGETS: dict[str, type[Target]] = {
    "json": Json,
    "bodies": Bodies,
    "templates": Templates,
    "gguf": Gguf,
    "configs": Configs,
    "tokenizers": Tokenizers,
    "schemas": Schemas,
}


def outcome_of(target: Target, data: bytes) -> str:
    """Run an input; return what came of it, which begins with "fault" if it should not have."""
    try:
        target.run(data)
    except target.refusals as error:
        return type(error).__name__
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"fault: {type(error).__name__}: {str(error)[:200]}"
    return "taken"


class Sandbox:
    """Runs inputs in a forked process, which is replaced when one ends it or takes too long.

    Args:
        target: what reads them.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pid = self._left = 0
        self._asking = self._answering = -1

    def outcome_of(self, data: bytes) -> str:
        """Run an input, as the function of the same name, for at most `SECONDS`."""
        if not self._left:
            self.end()
            self._begin()
        self._left -= 1
        os.write(self._asking, len(data).to_bytes(8, "little"))
        os.write(self._asking, data)  # blocks until all of it is written
        if not select.select([self._answering], [], [], SECONDS)[0]:
            os.kill(self._pid, signal.SIGKILL)
            return f"ended by signal {os.WTERMSIG(self.end())}"
        if said := os.read(self._answering, ANSWER_BYTES):
            return said.decode(errors="replace")
        return f"ended by signal {os.WTERMSIG(self.end())}"

    def end(self) -> int:
        """End the process, if there is one; return its status."""
        if not self._pid:
            return 0
        os.close(self._asking)  # at the end of its inputs it ends
        os.close(self._answering)
        _, status = os.waitpid(self._pid, 0)
        self._pid = self._left = 0
        return status

    def _begin(self) -> None:
        inputs, self._asking = os.pipe()
        self._answering, answers = os.pipe()
        self._pid, self._left = os.fork(), INPUTS_EACH
        if not self._pid:
            os.close(self._asking)
            with os.fdopen(inputs, "rb") as source:
                while length := source.read(8):
                    data = source.read(int.from_bytes(length, "little"))
                    said = outcome_of(self._target, data).encode(errors="replace")
                    os.write(answers, said[:ANSWER_BYTES])
            os._exit(0)
        os.close(inputs)
        os.close(answers)


def fuzz(name: str, begin: int, end: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """Run inputs of a target; return how often each outcome was, and the faults."""
    target = TARGETS[name](folder)
    corpus = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]
    outcomes: Counter[str] = Counter()
    faults, sandbox = [], Sandbox(target)
    for number in range(begin, end):
        draw = random.Random(f"{name} {seed} {number}")
        data = draw.choice(corpus)
        # The corpus itself comes first.
        data = corpus[number] if number < len(corpus) else mutated(data, corpus, draw)
        (folder.parent / "last").write_bytes(data)
        began = time.process_time()  # a busy machine may take long for nothing
        outcome = sandbox.outcome_of(data) if target.sandboxed else outcome_of(target, data)
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("fault"):
            faults.append(f"{name} {number} {outcome}")
        if time.process_time() - began > SECONDS and not target.sandboxed:
            outcomes["slow"] += 1
            faults.append(f"{name} {number}: {time.process_time() - began:.1f} s")
    sandbox.end()
    return outcomes, faults


def main() -> int:
    """Run; the exit code is 1 when there are faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    limit_memory(MEMORY)
    logging.disable(logging.CRITICAL)
    faulty = False
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.targets or TARGETS:
            folder = Path(scratch) / name / "files"
            folder.mkdir(parents=True)
            began = time.monotonic()
            end = options.begin + options.count
            outcomes, faults = fuzz(name, options.begin, end, options.seed, folder)
            seconds = time.monotonic() - began
            print(f"{name}: {options.count} in {seconds:.1f} s, {dict(outcomes)}", flush=True)
            print("".join(f"FAULT {fault}\n" for fault in faults), end="", flush=True)
            faulty |= bool(faults)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
