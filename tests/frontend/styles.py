"""Tokenizers in the styles of public ones, built small, and texts that are hard to cut."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
SPACE = "\u2581"
SAMPLE = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, they'll pay 1,234.56 and 99999!\n",
    "def f(x):\n    return x ** 2  # naïve café\n\n\tfor i in range(10):\r\n\t\tprint(i)\n",
    "Größe Straße über; l'été, señor, Ćma, Ελληνικά και русский язык, Привет мир.\n",
    "你好,世界。日本語のテキスト 한국어 문장 ภาษาไทย हिन्दी भाषा עברית שלום مرحبا بالعالم.\n",
    "😀👍🏽🏳️‍🌈🇩🇪 e\u0301a\u0308 ﬁﬂ ½ ² № \u00a0 \u200b\u3000 ... --- === [] {} <> \\ / @ $ ^ &\n",
)
"""What the small tokenizers are trained on."""

ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
LLAMA3 = ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = (
    ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HEAD = r"[^\r\n\p{L}\p{N}]?"
O200K = (
    rf"{HEAD}{UPPER}*{LOWER}+{ENGLISH}?|{HEAD}{UPPER}+{LOWER}*{ENGLISH}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
TEKKEN = (
    rf"{HEAD}{UPPER}*{LOWER}+|{HEAD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    + SPACES
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
)
CJK = "[一-龥ぁ-ゟ゠-ヿ]+"
BLOOM = r" ?[^(\s|[.,!?…。,、।۔،])]+"


@dataclass(frozen=True)
class Style:
    """A tokenizer in the style of a public one, and what its `tokenizer_config.json` says."""

    make: Callable[[], Tokenizer]
    config: dict[str, Any] = field(default_factory=dict)
    transformers: bool = True
    """Whether `transformers` makes of these files what `tokenizer.json` says."""


def splits(*expressions: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def byte_level(
    *steps: pre_tokenizers.PreTokenizer,
    last: pre_tokenizers.PreTokenizer = BYTES,
    normalizer: normalizers.Normalizer | None = None,
    added: tuple[AddedToken, ...] = (),
    bos: bool = False,
    ignore_merges: bool = False,
    decoder: decoders.Decoder | None = None,
) -> Tokenizer:
    """Byte-level BPE: GPT-2's kind and all that came of it."""
    made = Tokenizer(models.BPE())
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    made.decoder = decoders.ByteLevel() if decoder is None else decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=[*SPECIALS], show_progress=False
    )
    made.train_from_iterator(SAMPLE * 2, trainer)
    if ignore_merges:
        made.model.ignore_merges = True
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos:
        begin = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
        made.post_processor = processors.Sequence([made.post_processor, begin])
    made.add_tokens([*added])
    return made


@cache
def sentencepiece_parts(fallback: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of BPE over characters, as SentencePiece trains it."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*SPECIALS, *byte_names], show_progress=False
    )
    made.train_from_iterator([text.replace("\n", " ") for text in SAMPLE[:3]] * 2, trainer)
    model = json.loads(made.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for run in range(2, 9):  # SentencePiece keeps runs of spaces, which the trainer splits at
        vocabulary.setdefault(SPACE * run, len(vocabulary))
    merges = [tuple(merge) for merge in model["merges"]]
    return vocabulary, merges + [(SPACE * (run - 1), SPACE) for run in range(2, 9)]


PREPEND = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])


def sentencepiece(
    *,
    normalizer: normalizers.Normalizer | None = PREPEND,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    strip: int = 1,
    fallback: bool = True,
    fuse: bool = True,
    added: tuple[AddedToken, ...] = (),
    bos: bool = True,
) -> Tokenizer:
    """BPE over characters with "▁" for a space: Llama 2's kind."""
    vocabulary, merges = sentencepiece_parts(fallback)
    made = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=fuse, byte_fallback=fallback)
    )
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    made.add_tokens([*added])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return made


def unigram(
    *steps: normalizers.Normalizer, scheme: str = "always", fallback: bool = False
) -> Tokenizer:
    """Unigram: the kind of T5, ALBERT and XLM-RoBERTa."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([*steps])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=[*SPECIALS], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(SAMPLE * 3, trainer)
    if fallback:
        pieces = [(piece, score) for piece, score in json.loads(made.to_str())["model"]["vocab"]]
        pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
        made.model = models.Unigram(pieces, 0, True)
        made.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return made


def wordpiece(*, lowercase: bool) -> Tokenizer:
    """WordPiece: BERT's kind."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=[*SPECIALS], show_progress=False
    )
    made.train_from_iterator(SAMPLE * 2, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return made


def clip() -> Tokenizer:
    """BPE whose words end in "</w>"."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*SPECIALS],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator(SAMPLE * 2, trainer)
    return made


def words(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Whole words, the others unknown; without a decoder, tokens are joined by spaces."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=[*SPECIALS], show_progress=False)
    made.train_from_iterator(SAMPLE, trainer)
    if decoder is not None:
        made.decoder = decoder
    return made


def plain(text: str, **flags: bool) -> AddedToken:
    """An added token that is text, not special."""
    return AddedToken(text, special=False, **{"normalized": False, **flags})


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
RUNS = tuple(plain(" " * length, normalized=True) for length in range(8, 1, -1))
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}

STYLES: dict[str, Style] = {
    # Byte-level BPE, by how texts are split.
    "gpt2": Style(lambda: byte_level(last=GPT2), {"tokenizer_class": "GPT2Tokenizer"}),
    "roberta": Style(lambda: byte_level(last=pre_tokenizers.ByteLevel(add_prefix_space=True))),
    "gpt-neox": Style(lambda: byte_level(last=GPT2, normalizer=normalizers.NFC(), added=RUNS)),
    "codegen": Style(lambda: byte_level(last=GPT2, added=(*RUNS, plain("\t\t"), plain("\n\n")))),
    "cl100k": Style(lambda: byte_level(*splits(CL100K))),
    "o200k": Style(lambda: byte_level(*splits(O200K))),
    "llama3": Style(lambda: byte_level(*splits(LLAMA3), bos=True, ignore_merges=True)),
    "qwen2": Style(
        lambda: byte_level(*splits(QWEN2), normalizer=normalizers.NFC()),
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"},
    ),
    "qwen3-thinking": Style(
        lambda: byte_level(
            *splits(QWEN2),
            normalizer=normalizers.NFC(),
            added=(plain("<think>"), plain("</think>"), plain("<tool_call>")),
        )
    ),
    "qwen3.5": Style(lambda: byte_level(*splits(QWEN35), normalizer=normalizers.NFC())),
    "deepseek-v3": Style(lambda: byte_level(*splits(r"\p{N}{1,3}", CJK, DEEPSEEK3), bos=True)),
    "deepseek-r1-distill": Style(
        lambda: byte_level(*splits(QWEN2)),
        {**LLAMA, "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False},
        transformers=False,
    ),
    "deepseek-coder": Style(
        lambda: byte_level(*splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK), DIGITS)
    ),
    "starcoder": Style(lambda: byte_level(DIGITS, last=GPT2)),
    "command-r": Style(lambda: byte_level(DIGITS, last=GPT2, normalizer=normalizers.NFC())),
    "falcon": Style(
        lambda: byte_level(
            pre_tokenizers.Punctuation("contiguous"),
            GPT2,
            last=pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=False), *splits("[0-9][0-9][0-9]")]
            ),
        )
    ),
    "bloom": Style(lambda: byte_level(*splits(BLOOM))),
    "tekken": Style(lambda: byte_level(*splits(TEKKEN), bos=True, ignore_merges=True)),
    "nfkc-lower": Style(
        lambda: byte_level(
            last=GPT2,
            normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        )
    ),
    "stripping-added": Style(
        lambda: byte_level(
            last=GPT2,
            added=(plain("<a>", lstrip=True), plain("<b>", rstrip=True), plain("<word>")),
        )
    ),
    "sequence-decoder": Style(
        lambda: byte_level(last=GPT2, decoder=decoders.Sequence([decoders.ByteLevel()]))
    ),
    # SentencePiece's BPE, by what becomes of spaces.
    "llama2": Style(sentencepiece, {**LLAMA, "legacy": True}, transformers=False),
    "llama2-not-legacy": Style(sentencepiece, {**LLAMA, "legacy": False}, transformers=False),
    "metaspace-first": Style(
        lambda: sentencepiece(
            normalizer=None,
            pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        ),
        {**LLAMA, "legacy": False},
    ),
    "metaspace-always": Style(
        lambda: sentencepiece(
            normalizer=None,
            pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always", split=True),
        )
    ),
    "no-prefix": Style(
        lambda: sentencepiece(normalizer=normalizers.Replace(" ", SPACE), strip=0, bos=False)
    ),
    "gemma": Style(
        lambda: sentencepiece(
            normalizer=normalizers.Replace(" ", SPACE),
            pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
            strip=0,
            added=(*RUNS, plain("\n\n"), plain("<start_of_turn>")),
        )
    ),
    "phi3": Style(
        lambda: sentencepiece(added=(AddedToken("<|user|>", special=True, rstrip=True),))
    ),
    "codellama": Style(
        lambda: sentencepiece(added=tuple(plain(f"{SPACE}<{name}>") for name in ("PRE", "SUF")))
    ),
    "no-byte-fallback": Style(lambda: sentencepiece(fallback=False)),
    "unfused-unknown": Style(lambda: sentencepiece(fallback=False, fuse=False)),
    "nfkc-sentencepiece": Style(
        lambda: sentencepiece(normalizer=normalizers.Sequence([normalizers.NFKC(), PREPEND]))
    ),
    # Unigram, WordPiece and others.
    "t5": Style(
        lambda: unigram(
            normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")
        )
    ),
    "albert": Style(
        lambda: unigram(normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase())
    ),
    "xlm-roberta": Style(lambda: unigram(normalizers.NFKC(), scheme="first")),
    "unigram-bytes": Style(lambda: unigram(normalizers.NFC(), fallback=True)),
    "bert": Style(lambda: wordpiece(lowercase=True)),
    "bert-cased": Style(lambda: wordpiece(lowercase=False)),
    "clip": Style(clip),
    "words": Style(words),
    "words-fused": Style(lambda: words(decoders.Fuse())),
}

EMOJI = ("😀", "👍🏽", "🏳️‍🌈", "🇩🇪", "👨‍👩‍👧‍👦", "✈️", "🫠", "1️⃣")
MARKS = (
    "e\u0301",
    "a\u0308\u0323",
    "ﬁ",
    "Å",
    "Ω",
    "½",
    "²",
    "ｆｕｌｌ",
    "한",
    "\u1112\u1161\u11ab",
)
SCRIPTS = (
    *("你好", "世界。", "日本語", "カタカナ", "한국어", "𠮷野家", "ภาษาไทย", "हिन्दी", "తెలుగు"),
    *("مرحبا", "بِسْمِ", "שלום", "עִבְרִית", "Привет", "Ελλάδα", "ქართული", "\u202eabc\u202c"),
)
CONTROLS = (
    "\x00",
    "\x07",
    "\x1b[0m",
    "\x7f",
    "\x85",
    "\u200b",
    "\u200d",
    "\ufeff",
    "\u2028",
    "\xad",
)
LATIN = (
    "Hello",
    "world",
    "don't",
    "WE'LL",
    "I'M",
    "naïve",
    "Straße",
    "iPhone",
    "a",
    "x_y",
    "fooBar",
)
NUMBERS = ("0", "12", "3.14", "1,234,567", "٣٤", "²³", "1e-9", "2026-11-27", "१२३")
SIGNS = (".", "!?", "...", "--", "();", "{}", "<a>", "<b>", "<|", "\\n", "//", "@#$%", "`", "“”")
BLANKS = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", "\u00a0", "\u3000", " \n ")
NAMES = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "<0x41>", "▁", "Ġ", "<PRE>", "##a")
GROUPS = (EMOJI, MARKS, SCRIPTS, CONTROLS, LATIN, LATIN, NUMBERS, SIGNS, BLANKS, BLANKS, NAMES)
RUN_OF = ("a", " ", "\n", "0", "!", "=", "é", "好", "😀", "\u0301", "ab", ". ")


def texts(count: int, longest: int, seed: int = 0) -> Iterator[str]:
    """Yield texts of up to `longest` pieces of all kinds, with and without spaces between."""
    chosen = random.Random(seed)
    yield from ("", " ", "a", "  a", "a  ", *(each for group in GROUPS for each in group))
    fixed = 5 + sum(map(len, GROUPS))
    for place in range(count - fixed):
        if place % 25 == 0:
            yield chosen.choice(RUN_OF) * chosen.randint(2, 12 * longest)
            continue
        pieces = [chosen.choice(chosen.choice(GROUPS)) for _ in range(chosen.randint(1, longest))]
        yield chosen.choice(("", " ", " ")).join(pieces)
