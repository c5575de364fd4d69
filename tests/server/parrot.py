"""Tiny checkpoints that answer a few conversations by heart, for tests of what models say."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from twolane.frontend.text.template import ChatTemplate

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = 2
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
STEPS, LEAST_LOSS = 400, 0.003


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
    """A conversation and the answer to it."""

    messages: Sequence[dict[str, Any]]
    answer: str
    tools: Sequence[dict[str, Any]] = ()


def write_parrot(path: Path, learnt: Sequence[Learnt], template: str = TEMPLATE) -> Path:
    """Write a checkpoint that gives these answers to these conversations, and ends there.

    Without any its weights are random, and it is there at once.
    """
    words, rendered = tokenizer(), ChatTemplate(template, {})
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a team of threads crawls where other programs want the cores
    model = LlamaForCausalLM(config)
    prompts = [rendered.render(each.messages, tools=each.tools) for each in learnt]
    answers = [words.encode(each.answer).ids for each in learnt]
    if learnt:
        train(model, [(words.encode(p).ids, a) for p, a in zip(prompts, answers, strict=True)])
    model.save_pretrained(path)
    words.save(str(path / "tokenizer.json"))
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**kept, "chat_template": template}))
    return path


def train(model: LlamaForCausalLM, pairs: Sequence[tuple[list[int], list[int]]]) -> None:
    """Learn the answers by heart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        losses = []
        for prompt, answer in pairs:
            ids = torch.tensor([[*prompt, *answer, END]])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            losses.append(model(input_ids=ids, labels=labels).loss)
        loss = torch.stack(losses).mean()
        if loss < LEAST_LOSS:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"not learnt: {float(loss)}")
