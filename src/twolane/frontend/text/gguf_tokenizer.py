"""Tokenizers of GGUF files, with llama.cpp's defaults for missing keys.

The keys and defaults are those of llama.cpp's `llama_vocab::load` (src/llama-vocab.cpp at commit
00ad355): `tokenizer.ggml.model` names the algorithm, `tokenizer.ggml.pre` how texts are split.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from twolane.frontend.text.parts import Parts, Template
from twolane.frontend.text.sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    Spaces,
    add_pieces,
    build,
    finished,
)
from twolane.frontend.text.tokenizer import Declared
from twolane.model.load.gguf_file import GGUFFile

KEY = "tokenizer.ggml."
SUFFIXES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
"""English contractions in either case, which GPT-4's pre-tokenizer keeps together."""
SPACES = r"\s+(?!\S)|\s+"


def gpt4(
    numbers: str,
    words: str = r"[^\r\n\p{L}\p{N}]?\p{L}+",
    marks: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    suffixes: str = SUFFIXES,
    lines: str = r"\s*[\r\n]+",
) -> str:
    """Return the regular expression of GPT-4's pre-tokenizer, with parts that models vary."""
    return "|".join(filter(None, (suffixes, words, numbers, marks, lines, SPACES)))


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = gpt4(r"\p{N}{1,3}")
QWEN2 = gpt4(r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HEAD = r"[^\r\n\p{L}\p{N}]?"
CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def cased(suffixes: str) -> str:
    """Return the word pattern of newer pre-tokenizers: capitals begin a word, small letters end
    it."""
    return f"{HEAD}{UPPER}*{LOWER}+{suffixes}|{HEAD}{UPPER}+{LOWER}*{suffixes}"


TEKKEN = "|".join((cased(""), r"\p{N}", CASED_MARKS, r"\s*[\r\n]+", SPACES))
GPT4O = "|".join((cased(f"{SUFFIXES}?"), r"\p{N}{1,3}", CASED_MARKS, r"\s*[\r\n]+", SPACES))
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + SPACES,
)
CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u10d0-\u10ff]]"
"""Letters that have a case; Georgian's ordinary ones have none yet in DeepSeek's table."""
DEEPSEEK = (
    r"[\r\n]",
    rf"\s?{CASED}+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


class Splitting(NamedTuple):
    """The pre-tokenizer of one value of `tokenizer.ggml.pre`."""

    expressions: tuple[str, ...]
    """Regular expressions, each splitting the pieces of the ones before it into its matches and the
    text between."""
    add_bos: bool = False
    ignore_merges: bool = False
    """Whether a word that is a token becomes that token without merges."""


_DIGITS = Splitting((r"\p{N}", GPT2))
_KINDS: Mapping[Splitting, str] = {
    Splitting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    Splitting((LLAMA3,), add_bos=True, ignore_merges=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    Splitting((LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    Splitting((GPT2,)): (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "mpt olmo jais trillion granite-docling exaone4"
    ),
    _DIGITS: "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    Splitting((QWEN2,)): (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2"
    ),
    Splitting(
        (gpt4(r"\p{N}", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)
    ): "qwen35",
    Splitting((gpt4(r"\p{N}", suffixes=""),)): "ufakzeka",
    Splitting(DEEPSEEK): "deepseek-llm",
    Splitting(DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    Splitting(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ): "deepseek-coder",
    Splitting((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")): "falcon",
    Splitting((BLOOM,)): "poro-chat bloom gpt3-finnish",
    Splitting((BLOOM, r"\p{N}")): "viking",
    Splitting((TEKKEN,), add_bos=True, ignore_merges=True): "tekken",
    Splitting((GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    Splitting((gpt4(r"\p{N}", lines=r"\s*[\r\n]"),)): "bailingmoe bailingmoe2 llada-moe",
    Splitting((gpt4(r"\p{N}", marks=r" ?[^\s\p{L}\p{N}\r\n]+"),)): "seed-coder",
    Splitting((r"\p{N}{1,3}", gpt4(r"\p{N}+")), ignore_merges=True): "minicpm5",
}
SPLITTINGS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""Pre-tokenizers by the value of `tokenizer.ggml.pre`; llama.cpp has some more, of models that are
not served."""
END_TOKENS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
        # Of models that fill in the middle: padding, and the begin of another file or repository.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    )
)
"""Names of tokens that end an answer and are special, whatever else the file states."""


def from_gguf(path: Path) -> Parts | None:
    """Read the tokenizer of a GGUF file; None: the file states that it has none.

    Raises:
        ValueError: a key is missing, or has a value that is not built.
    """
    file = GGUFFile(path)

    def key(name: str) -> Any:
        return file.value(KEY + name)

    kind = key("model")
    if kind in (None, "no_vocab", "none"):
        return None
    if kind not in ("llama", "gpt2", "gemma4"):
        raise ValueError(f"{KEY}model {kind!r} is not built; these work: llama, gpt2, gemma4, none")
    tokens = [t or f"[EMPTY_{place}]" for place, t in enumerate(needed(key, "tokens"))]
    if kind == "gemma4":  # a text means the last of its ids, as in llama.cpp
        last = {token: place for place, token in enumerate(tokens)}
        tokens = [t if last[t] == i else f"[UNUSED_{i}]" for i, t in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ValueError(f"{KEY}tokens has {twice!r} more than once")
    kinds: list[int] = list(key("token_type") or [NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ValueError(f"{KEY}token_type has {len(kinds)} entries for {len(tokens)} tokens")
    add_bos = True
    ends = end_names(tokens)
    kinds = [CONTROL if t in ends else k for t, k in zip(tokens, kinds, strict=True)]
    if kind == "llama":
        scores = list(needed(key, "scores"))
        if len(scores) != len(tokens):
            raise ValueError(f"{KEY}scores has {len(scores)} entries for {len(tokens)} tokens")
        prefix = key("add_space_prefix") is not False
        backend = build(tokens, scores, kinds, Spaces("each" if prefix else "none"))
    elif kind == "gemma4":
        backend = by_characters(tokens, kinds, needed(key, "merges"))
    else:
        name = key("pre") or "default"
        if name not in SPLITTINGS:
            known = ", ".join(sorted(SPLITTINGS))
            raise ValueError(f"{KEY}pre {name!r} is not built; these work: {known}")
        splitting = SPLITTINGS[name]
        add_bos = splitting.add_bos
        backend = byte_level(tokens, kinds, needed(key, "merges"), splitting)
    given = key("add_bos_token")
    special_tokens = special_names(key, tokens, kinds, kind)
    parts = Parts(backend, path.name, special_tokens, add_bos if given is None else bool(given))
    parts.add_eos = bool(key("add_eos_token"))
    parts.config_name = path.name
    parts.ends = declared_ends(key, tokens)
    parts.templates = templates_of(file)
    return parts


def needed(key: Any, name: str) -> Sequence[Any]:
    """Return a list that a tokenizer requires.

    Raises:
        ValueError: the file lacks it.
    """
    value: Sequence[Any] | None = key(name)
    if value is None:
        raise ValueError(f"the GGUF file has no {KEY}{name}")
    return value


def byte_level(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], splitting: Splitting
) -> Tokenizer:
    """Return byte-level BPE with the pre-tokenizer of a value of `tokenizer.ggml.pre`."""
    vocabulary = {token: place for place, token in enumerate(tokens)}
    pairs = merged_pairs(merges)
    backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=splitting.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in splitting.expressions]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    backend.decoder = decoders.ByteLevel()
    add_pieces(backend, tokens, kinds)
    return backend


def merged_pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Return the two tokens of each merge."""
    cuts = ((merge, merge.find(" ", 1)) for merge in merges)  # a token may be a space
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def by_characters(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str]) -> Tokenizer:
    """Return Gemma 4's BPE: of characters, with bytes for those that are no token, and merges that
    do not cross the ends of lines."""
    vocabulary = {token: place for place, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    model = models.BPE(
        vocabulary, merged_pairs(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = finished(Tokenizer(model), tokens, kinds, Spaces("none"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    return backend


_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}


def special_names(
    key: Any, tokens: Sequence[str], kinds: Sequence[int], kind: str
) -> dict[str, str]:
    """Return the special tokens by name: those of the keys, and llama.cpp's defaults.

    The defaults of byte-level BPE are Falcon's (11); elsewhere that is an ordinary word.
    """
    defaults = _DEFAULTS[kind]
    named = {"unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token"}
    names = {}
    for name in ("bos", "eos", "unknown", "seperator", "padding"):
        place = key(f"{name}_token_id")
        if place is None:
            place = defaults.get(name, len(tokens))
            if kind == "gpt2" and place < len(tokens) and kinds[place] != CONTROL:
                continue
        if place < len(tokens):
            names[named.get(name, f"{name}_token")] = tokens[place]
    return names


def declared_ends(key: Any, tokens: Sequence[str]) -> list[Declared]:
    """Return the end tokens of the keys, and those that are known by their names."""
    ends = []
    for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"):
        place = key(f"{name}_token_id")
        if place is not None and place < len(tokens):
            ends.append(Declared(place, tokens[place], f"{KEY}{name}_token_id"))
    names = end_names(tokens)
    if {"<|call|>", "<|calls|>"} & names and {"<|return|>", "<|flush|>"} & names:
        names = names - {"<|end|>"}  # gpt-oss goes on after a message's end
    ends += [
        Declared(place, token, "its name") for place, token in enumerate(tokens) if token in names
    ]
    return ends


def end_names(tokens: Sequence[str]) -> frozenset[str]:
    """Return the names of `END_TOKENS` that a vocabulary has; Gemma 4 uses one as text."""
    there = END_TOKENS.intersection(tokens)
    return there - {"</s>"} if "<|tool_response>" in there else there


def templates_of(file: GGUFFile) -> dict[str, Template]:
    """Return the chat templates of a file, by name."""
    key = "tokenizer.chat_template"
    templates = {}
    for name in file.fields:
        value = file.value(name) if name.startswith(key) else None
        if isinstance(value, str) and value:
            short = "default" if name == key else name.removeprefix(f"{key}.")
            templates[short] = Template(value, name)
    return templates
