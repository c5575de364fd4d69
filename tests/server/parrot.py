"""Tiny checkpoints that know a few answers by heart, for tests of what models say."""

import json
import string
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HIDDEN = 256
PROMPT = """<|im_start|>assistant
"""
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
Call them as <tool_call>{"name": ..., "arguments": ...}</tool_call>, behind </think>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer() -> Tokenizer:
    """One token a character of ASCII, and the marks."""
    printable = [
        *SPECIAL,
        *MARKS,
        "Ġ",
        "Ċ",
        *sorted(set(string.printable) - set(string.whitespace)),
    ]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(printable)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return made


class Learnt(NamedTuple):
    """What to answer to a conversation whose last message contains some text."""

    said: str
    answer: str | Sequence[str]
    """Its text, or the texts of its tokens. Where a grammar has one way on, it allows only tokens
    that the tokenizer makes of that text alone: one of them must end where another way begins."""
    pieces: int = 3
    """An answer that is given as text has this many tokens."""

    @property
    def tokens(self) -> list[str]:
        """The texts of the answer's tokens."""
        if not isinstance(self.answer, str):
            return list(self.answer)
        size = -(-len(self.answer) // self.pieces)
        return [self.answer[i : i + size] for i in range(0, len(self.answer), size)]


def write_parrot(
    path: Path,
    learnt: Sequence[Learnt],
    template: str = TEMPLATE,
    words: Tokenizer | None = None,
    made: Callable[[int, int], PreTrainedModel] | None = None,
    after: str = PROMPT,
    mark: Callable[[int], str] = "<|say {}|>".format,
) -> Path:
    """Write a checkpoint that gives these answers, and ends there.

    The chat template puts a mark at the end of the prompt that says which answer is due; each
    token of the model calls for the next one. Its context is long: nothing else in the prompt
    counts. Without any answer its weights are random.

    Args:
        path: of the checkpoint.
        learnt: the answers; no two of their tokens may have the same text.
        template: of conversations.
        words: a tokenizer to add to; None: one token a character.
        made: makes the model, given the size of the vocabulary and the token that ends answers;
            None: a model of one layer.
        after: the text of the template behind which the mark stands.
        mark: returns the text of the mark of an answer by its number.
    """
    words = words or tokenizer()
    marks = [mark(i) for i in range(len(learnt))]
    chains = [[mark, *each.tokens] for mark, each in zip(marks, learnt, strict=True)]
    texts = [text for chain in chains for text in chain]
    assert len(set(texts)) == len(texts), "two tokens have the same text"
    words.add_special_tokens([END])
    words.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    model = (made or random_model)(words.get_vocab_size(), words.token_to_id(END))
    if learnt:
        ids = [[words.token_to_id(text) for text in (*chain, END)] for chain in chains]
        teach(model, ids, words.token_to_id(END))
    model.save_pretrained(path)
    words.save(str(path / "tokenizer.json"))
    shown = template.replace(after, after + saying(marks, learnt))
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps({**kept, "chat_template": shown}))
    return path


def saying(marks: Sequence[str], learnt: Sequence[Learnt]) -> str:
    """Return the part of a chat template that writes the mark of the answer that is due."""
    if not learnt:
        return ""
    # Claude Code says something as the system behind what its user says.
    said = "{%- set said = messages | rejectattr('role', 'equalto', 'system') | list or messages %}"
    last = said + "{%- set last = said[-1].content or '' %}"
    cases = [
        f"{{%- {'elif' if i else 'if'} {json.dumps(each.said)} in last %}}"
        f"{{{{- {json.dumps(mark)} }}}}"
        for i, (mark, each) in enumerate(zip(marks, learnt, strict=True))
    ]
    return last + "".join(cases) + "{%- endif %}"


def random_model(vocabulary: int, end: int) -> LlamaForCausalLM:
    """Return a tiny model with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=65536,
        bos_token_id=None,
        eos_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def teach(model: PreTrainedModel, chains: Sequence[Sequence[int]], end: int) -> None:
    """Let each token of a chain call for the next one, and every other token for the end.

    No layer adds anything: what is predicted depends on the last token alone.
    """
    links = [(a, b) for chain in chains for a, b in pairwise(chain)]
    assert len(links) < HIDDEN, "too many tokens for this many dimensions"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")):
                parameter.zero_()
        embedded, head = model.get_input_embeddings().weight, model.lm_head.weight
        embedded.zero_()
        head.zero_()
        embedded[:, -1] = 1.0
        head[end, -1] = 1.0
        for place, (token, following) in enumerate(links):
            embedded[token, -1] = 0.0
            embedded[token, place] = 1.0
            head[following, place] = 1.0
