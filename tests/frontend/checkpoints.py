"""Small tokenizers and their files, of the kinds that public checkpoints have."""

import json

from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from twolane.frontend.text.codec import TextCodec, byte_alphabet
from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import resolve

SPECIALS = ("<|end|>", "<|start|>", "<|stop|>")
BYTES = [character for character, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])]
WORDS = (
    *("\u2581", "o", "n", "e", "t", "w", "h", "i", "[", "]", "on", "one", "\u2581one", "\u2581["),
    *("\u2581\u2581", "hi", "\u2581hi", "\u2581t", "two", "tw", "\u2581two"),
)
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
MERGES = [
    *(("o", "n"), ("on", "e"), ("\u2581", "one"), ("\u2581", "["), ("\u2581", "\u2581")),
    *(("h", "i"), ("\u2581", "hi"), ("t", "w"), ("tw", "o"), ("\u2581", "two")),
]


def byte_level(added=(), post=None):
    """Byte-level BPE with three special tokens (ids 0 to 2), 256 bytes and one merge."""
    tokens = [*SPECIALS, *BYTES, "Ġa"]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if post is not None:
        made.post_processor = post
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    made.add_tokens([AddedToken(token, normalized=False) for token in added])
    return made


def llama2():
    """SentencePiece as Llama 2 has it: a space before the text and after each special token."""
    vocabulary = {piece: place for place, piece in enumerate(PIECES)}
    made = Tokenizer(
        models.BPE(vocabulary, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    specials = [AddedToken(s, special=True, normalized=False) for s in PIECES[:3]]
    made.add_special_tokens(specials)
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def write(folder, tokenizer, **config):
    """Write a directory with `tokenizer.json`, if there is one, and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_gguf(file, **keys):
    """Write a GGUF file that has nothing but a tokenizer; "__" stands for a point in a key."""
    writer = GGUFWriter(file, "llama")
    for name, value in keys.items():
        name = "tokenizer." + name.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def sentencepiece_keys(**more):
    """The keys of a SentencePiece vocabulary."""
    ranks = {"".join(merge): -float(rank + 1) for rank, merge in enumerate(MERGES)}
    return {
        "ggml__model": "llama",
        "ggml__tokens": PIECES,
        "ggml__scores": [ranks.get(piece, -100.0 - i) for i, piece in enumerate(PIECES)],
        "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259),
        **more,
    }


def byte_level_keys(**more):
    """The keys of a byte-level vocabulary."""
    tokens = [*SPECIALS, *BYTES, "Ġa", "12"]
    return {
        "ggml__model": "gpt2",
        "ggml__tokens": tokens,
        "ggml__merges": ["Ġ a", "1 2"],
        "ggml__token_type": [3] * 3 + [1] * 258,
        **more,
    }


def codec(path):
    """The codec of a directory or file."""
    return TextCodec(load_tokenizer(resolve(str(path))))
