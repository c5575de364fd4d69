"""Whatever ends under a grammar is what the grammar says, by the tokenizer's own decoding.

Names and literals are spelled from an alphabet of special tokens, escapes, spaces and marks of
tokenizers. Tokens are chosen by chance among those that the engine's masks allow; texts are checked
by jsonschema-rs, which has nothing to do with llguidance.
"""

import json
import random
import re
from collections import Counter
from itertools import product

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from twolane import LLM, SamplingParams
from twolane.common.errors import FieldError
from twolane.engine.constrained.constraints import GrammarError, Grammars, Masks
from twolane.engine.messages import Output
from twolane.frontend.structured.grammar import (
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    made_grammar,
    regex_grammar,
)
from twolane.frontend.structured.tools import Tool, calls_grammar
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.output_reader import OutputReader, TextOptions
from twolane.frontend.text.tokenizer import ModelTokenizer
from twolane.frontend.text.vocabulary import byte_alphabet

from ..server.serving import write_tiny_model

QUICK, LONG, ANSWERS, TOKENS = 30, 340, 5, 120
"""Grammars of each vocabulary in the short form and of each seed in the long one, answers to each,
and their most tokens. The long form has 15,300 answers, of which 14,084 end, and takes 80 s of
CPU."""
SERVED = 500
"""Answers of a real engine over each vocabulary, in the long form."""
SPECIAL = ("<unk>", "<s>", "</s>", "<|end|>")
EOS, END = 2, 3
PIECES = (
    *(*SPECIAL, "<tool_call>", "▁", " ", "  ", "é", "e\u0301", "ﬁ", "\u00a0", "\u3000", "😀", "Ġ"),
    *('"', "\\", "/", "\n", "\t", "[", "]", "&&", "--", "~~", "{}", "a", "ab", "abc", "A", "1"),
    *("12", "<0x41>", "\\u0061", "\u2028", "\ufeff", ".", "^$", "|", "Foo", "#"),
)
PATTERNS = (
    *("^[^a&&b]{1,3}$", r"^[\[\]&~-]+$", r"^\s\S$", r"^\w+ \W{1,2}$", "^(?:<s>|</s>)+$"),
    *(r"^\cJ\/?$", "^[▁é ]{2}$", "^😀?$", "^ +a$", r"^\.\d{2}\\$"),
    *("^(a|ab)(c|bcd)$", "^<0x41>|▁$", r"[^\x00-\x7f]$"),
)
KINDS = ("byte-level", "sentencepiece", "metaspace")


def tokenizer(kind):
    """A tokenizer of a few hundred tokens that changes much of what it reads."""
    words = ["on", "one", "ab", "abc", "true", "null", "12", "Foo", '":', '",', '{"', "\\n", "é"]
    added = [AddedToken("Foo", lstrip=True), AddedToken("1", rstrip=True), AddedToken("ab")]
    added += [AddedToken("  ", normalized=False), AddedToken("<tool_call>"), AddedToken("é")]
    if kind == "byte-level":
        names = {byte: name for name, byte in byte_alphabet().items()}
        pieces = [
            *SPECIAL,
            *names.values(),
            *("".join(names[b] for b in w.encode()) for w in words),
        ]
        pieces += ["Ġa", "Ġ{"]
        made = Tokenizer(models.BPE({p: i for i, p in enumerate(dict.fromkeys(pieces))}, []))
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = decoders.ByteLevel()
    else:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "sentencepiece" else []
        signs = [chr(code) for code in range(0x21, 0x7F)]
        pieces = [*SPECIAL, *bytes_, *signs, "▁", "▁▁", "▁a", "▁{", "▁one", "\n", "ü", "😀", *words]
        vocab = {p: i for i, p in enumerate(dict.fromkeys(pieces))}
        made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=bool(bytes_)))
        if bytes_:
            space = normalizers.Replace(" ", "▁")
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace()
            made.decoder = decoders.Metaspace()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.add_tokens(added)
    return ModelTokenizer(made, None, {})


def literal(chance):
    return "".join(chance.choices(PIECES, k=chance.randrange(4)))


def names(chance):
    """Some of them begin others."""
    begun = literal(chance)
    found = [begun, begun + literal(chance), literal(chance), begun + chance.choice(PIECES)]
    return chance.sample([*dict.fromkeys(found)], k=chance.randint(1, len({*found})))


def schema(chance, depth=2):
    match chance.choice(["const", "enum", "pattern", "plain"] + ["object", "array", "any"] * depth):
        case "const":
            return {"const": chance.choice([literal(chance), {literal(chance): literal(chance)}])}
        case "enum":
            return {"enum": [literal(chance), chance.choice([1.5, None, [literal(chance)]])]}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(PATTERNS)}
        case "array":
            return {"type": "array", "items": schema(chance, depth - 1), "maxItems": 2}
        case "any":
            return {"anyOf": [schema(chance, depth - 1), schema(chance, depth - 1)]}
        case "object":
            return object_schema(chance, depth)
    return {"type": chance.choice(["boolean", "null", "integer"])}


def object_schema(chance, depth):
    declared = names(chance)
    made = {
        "type": "object",
        "properties": {name: schema(chance, depth - 1) for name in declared},
        "required": chance.sample(declared, k=chance.randrange(len(declared))),
    }
    if chance.random() < 0.6:
        made["additionalProperties"] = chance.choice([False, {"type": "null"}])
    if chance.random() < 0.2:
        made["patternProperties"] = {"^" + re.escape(chance.choice(declared)[:3]): {}}
    if chance.random() < 0.2:
        merged = {"properties": made.pop("properties"), "required": made.pop("required")}
        made = {**made, "allOf": [merged], "additionalProperties": True}
    return made


def request(chance, codec):
    """A constraint's kind, the maker of its grammar, and a check of an answer's text."""
    kind = chance.choice(["schema"] * 6 + ["regex", "choice", "gbnf", "call"])
    if kind == "schema":
        wanted = schema(chance)
        return kind, wanted, lambda: json_schema_grammar(wanted), lambda text: valid(wanted, text)
    if kind == "regex":
        regex = chance.choice([*PATTERNS, "^" + escaped(literal(chance)) + "x?"])
        whole = jsonschema_rs.Draft202012Validator({"pattern": f"^(?:{regex})$"})
        return kind, regex, lambda: regex_grammar(regex), whole.is_valid
    if kind == "choice":
        choices = [literal(chance) for _ in range(3)]
        return kind, choices, lambda: choice_grammar(choices), choices.__contains__
    if kind == "gbnf":
        parts = [literal(chance), literal(chance)]
        texts = {"".join(pair) for pair in product(parts, [parts[1], "-"])}
        rules = [json.dumps(part, ensure_ascii=False) for part in parts]
        text = f'root ::= ({rules[0]} | start) ({rules[1]} | "-")\nstart ::= {rules[1]}'
        return kind, text, lambda: context_free_grammar(text), texts.__contains__
    tool = Tool(literal(chance).replace("/", "") or "f", object_schema(chance, 1))
    made = lambda: calls_grammar("hermes", [tool], codec.token_of, several=False)  # noqa: E731
    return kind, tool, made, lambda text: called(tool, text)


def escaped(text):
    return re.sub(r"[\\^$.*+?()[\]{}|/-]", r"\\\g<0>", text)


def valid(wanted, text):
    """Whichever of the values of a name that occurs twice is taken."""
    whole = jsonschema_rs.validator_for(wanted)
    first = json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    return whole.is_valid(json.loads(text)) and whole.is_valid(first)


def called(tool, text):
    found = re.fullmatch(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    call = json.loads(found[1])
    return call["name"] == tool.name and valid(tool.parameters, json.dumps(call["arguments"]))


def spellings(what):
    """The strings of a constraint in JSON, also as no answer may spell them."""
    found = [
        literal[1:-1] for literal in re.findall(r'"(?:\\.|[^"\\])*"', json.dumps(what, default=str))
    ]
    plain = [json.dumps(json.loads(f'"{each}"'), ensure_ascii=False) for each in found]
    escaped = [f'"\\u{ord(each[1]):04x}{each[2:]}' for each in plain if each[1] not in '"\\']
    return [each.encode() for each in [*plain, *escaped, *SPECIAL]]


class Fuzz:
    """Answers to random grammars over one vocabulary."""

    def __init__(self, kind, seed):
        self.codec = TextCodec(tokenizer(kind))
        self.chance = random.Random(f"{kind} {seed}")
        self.counts = Counter()
        self.vocabulary = self.codec.vocabulary()
        size = len(self.vocabulary.texts)
        self._grammars = Grammars(self.vocabulary, size + 9, [EOS, END], lambda: None, groups=1)
        self._masks = Masks(lambda: None, 1)

    def run(self, count):
        for _ in range(count):
            kind, what, make, check = request(self.chance, self.codec)
            try:
                grammar = made_grammar(make, "x")
                self._grammars.constraint(grammar, {EOS, END}).result()
            except (FieldError, GrammarError) as error:
                self.counts[f"{kind} refused"] += 1
                assert "panick" not in str(error), what
                continue
            self.aims = spellings(what)
            for _ in range(ANSWERS):
                text = self.answer(grammar, shows=kind == "call")
                self.counts[f"{kind} {'ended' if text is not None else 'not ended'}"] += 1
                assert text is None or check(text), (what, text)

    def answer(self, grammar, *, shows):
        """The text of an answer as a client reads it; None: it did not end by itself."""
        chance = self.chance
        constraint, mask = self._grammars.constraint(grammar, {EOS, END}).result()
        prompt = chance.choice([[], [1], [1, 40, 41], [EOS] * 9])
        options = TextOptions(skip_special_tokens=not shows)
        params = SamplingParams(grammar=grammar)
        reader = OutputReader(0, self.codec, prompt, params, options, [EOS, END])
        eager, text, self.aim = chance.random() < 0.5, [], b""
        for _ in range(TOKENS):
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token = self.choose(np.flatnonzero(bits), eager)
            last = token in (EOS, END)
            output = Output("r", [token], finish="stop" if last else None)
            text.append(reader.read(output).text)
            if last:
                return "".join(text)
            constraint.take(token)
            [mask] = self._masks.start([constraint]).result()
            if isinstance(mask, GrammarError):
                return None
        return None

    def choose(self, allowed, eager):
        """A token: any, one that ends something, a long one, or one of a name or literal."""
        texts, chance, allowed = self.vocabulary.texts, self.chance, allowed.tolist()
        begun = [token for token in allowed if texts[token] and self.aim.startswith(texts[token])]
        if begun and chance.random() < 0.9:
            token = max(begun, key=lambda token: len(texts[token]))
            self.aim = self.aim[len(texts[token]) :]
            return token
        self.aim = chance.choice(self.aims)
        ends = [token for token in allowed if token in (EOS, END) or texts[token] in b'"}]']
        if ends and chance.random() < 0.5:
            return chance.choice(ends)
        some = chance.choices(allowed, k=3)
        return max(some, key=lambda token: len(texts[token])) if eager else some[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_is_what_the_grammar_says(kind):
    fuzz = Fuzz(kind, 0)
    fuzz.run(QUICK)
    assert fuzz.counts["schema ended"] >= 30, fuzz.counts


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_is_what_the_grammar_says_in_many_cases(kind, seed):
    fuzz = Fuzz(kind, seed)
    fuzz.run(LONG)
    print(kind, seed, dict(sorted(fuzz.counts.items())))
    ended = sum(count for name, count in fuzz.counts.items() if name.endswith(" ended"))
    assert ended >= LONG


def served(path, kind):
    """A checkpoint of random weights with the vocabulary of a kind, and its size."""
    made = tokenizer(kind).backend
    size = made.get_vocab_size() + 9
    write_tiny_model(path, vocab_size=size, eos_token_id=[EOS, END])
    made.save(str(path / "tokenizer.json"))
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[EOS]}
    (path / "tokenizer_config.json").write_text(json.dumps(beside))
    return path


FORMS = {"schema": "json", "regex": "regex", "choice": "choice", "gbnf": "grammar"}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_engine_ends_is_what_the_grammar_says(kind, tmp_path):
    """Through all of the program: the fields, the grammar's process, the engine and its masks.

    Tokens are sampled, and biased towards those that end something or are of a name or literal.
    """
    codec, chance, counts = TextCodec(tokenizer(kind)), random.Random(f"{kind} engine"), Counter()
    texts = codec.vocabulary().texts
    ends = {token: 6.0 for token, text in enumerate(texts) if text and text in b'"}]'}
    ends |= {EOS: 8.0, END: 8.0}
    given = {"max_tokens": TOKENS, "temperature": 1.0}
    model = str(served(tmp_path / "m", kind))
    with LLM(model, load_format="dummy", device="cpu", kv_tokens=8192) as llm:
        while counts.total() < SERVED:
            form, what, _, check = request(chance, codec)
            if form not in FORMS:
                continue
            aims = spellings(what)
            bias = {t: 5.0 for t, text in enumerate(texts) if any(text in aim for aim in aims)}
            params = [
                SamplingParams(**given, seed=seed, logit_bias={**bias, **ends} if seed % 4 else {})
                for seed in range(ANSWERS)
            ]
            wanted = {FORMS[form]: what}
            try:
                answers = llm.generate(["a"] * ANSWERS, params, structured_outputs=wanted)
            except ValueError as error:
                counts[f"{form} refused"] += 1
                assert "structured_outputs" in str(error)
                continue
            for answer in answers:
                ended = answer.finish_reason == "stop"
                counts[f"{form} {'ended' if ended else 'not ended'}"] += 1
                assert not ended or check(answer.text), (what, answer.text)
    print(kind, dict(sorted(counts.items())))
    assert sum(count for name, count in counts.items() if name.endswith(" ended")) > SERVED / 2
