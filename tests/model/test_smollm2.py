"""The embedded default model, against `transformers`' own reading of the GGUF file."""

import pytest
import torch

from twolane.model.attention import Segment
from twolane.model.convert import read
from twolane.model.shapes import SHAPES
from twolane.model.weights import load_decoder

from .passes import Pool, close, forward

PROMPTS = ["What is the capital of France?", "Write a haiku about two lanes.", "Count: 1, 2, 3,"]


@pytest.fixture(scope="module")
def decoder(smollm2):
    return load_decoder(smollm2)


@pytest.fixture(scope="module")
def prompts(smollm2):
    tokenizer = read(smollm2.tokenizer)
    return [
        torch.tensor(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False
            )
        )
        for p in PROMPTS
    ]


def test_the_shape_inside_is_that_of_the_file(decoder):
    file, shape = decoder.spec, SHAPES["smollm2-135m-instruct"]
    assert file.norm_eps == pytest.approx(shape.norm_eps)
    assert {**vars(file), "norm_eps": 0} == {**vars(shape), "norm_eps": 0}


def test_logits(decoder, prompts, smollm2_reference):
    pool = Pool(decoder)
    for tokens in prompts:
        pages = pool.take(len(tokens))
        cut = len(tokens) // 2
        first = forward(decoder, pool, [Segment(0, cut, pages)], [tokens[:cut]])
        rest = [Segment(cut, len(tokens) - cut, pages)]
        second = forward(decoder, pool, rest, [tokens[cut:]])
        want = smollm2_reference(tokens[None]).logits[0]
        close(torch.cat([*first, *second]), want)


def test_greedy_tokens_of_a_batch(decoder, prompts, smollm2_reference):
    """Three sequences decoded together give the reference's tokens, and the answer."""
    steps, pool = 16, Pool(decoder)
    pages = [pool.take(len(t) + steps) for t in prompts]
    segments = [Segment(0, len(t), p) for t, p in zip(prompts, pages, strict=True)]
    logits = forward(decoder, pool, segments, prompts)
    texts = [[int(rows[-1].argmax())] for rows in logits]
    for step in range(steps - 1):
        segments = [Segment(len(t) + step, 1, p) for t, p in zip(prompts, pages, strict=True)]
        last = [torch.tensor(text[-1:]) for text in texts]
        for text, rows in zip(texts, forward(decoder, pool, segments, last), strict=True):
            text.append(int(rows[-1].argmax()))
    for tokens, text in zip(prompts, texts, strict=True):
        whole = torch.cat([tokens, torch.tensor(text)])
        rows = smollm2_reference(whole[None]).logits[0, len(tokens) - 1 : -1]
        best = rows.topk(2)
        sure = best.values[:, 0] - best.values[:, 1] > 1e-3
        assert sure.sum() > steps - 2
        assert best.indices[sure, 0].tolist() == torch.tensor(text)[sure].tolist()
