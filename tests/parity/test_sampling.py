"""Penalties, bias and log-probabilities, against the processors and logits of `transformers`."""

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.model.checkpoints import LAYERS, VOCAB, load_decoder, make_checkpoint, reference
from tests.parity.judge import SURE
from tests.parity.prompts import random_requests
from tests.parity.schedules import schedules
from tests.parity.serving import Served, serve
from twolane.engine.messages import Submit
from twolane.model.decoder import Decoder
from twolane.model.load.hub import resolve
from twolane.sampling import SamplingParams, TokenLogprobs

PAGE = 8
TOP = 5
SMALL = 68
"""Pages: one of the longest requests, and little beside it."""


@pytest.fixture(scope="module", params=["qwen2", pytest.param("llama31", marks=pytest.mark.full)])
def models(request, tmp_path_factory) -> tuple[Decoder, torch.nn.Module]:
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("sampling") / "model", seed=1)
    return load_decoder(resolve(str(path))), reference(Path(path))


def requests() -> list[Submit]:
    """Greedy, of all lengths; each with penalties and bias of its own, some with none."""
    rng = random.Random(3)
    return [_adjusted(submit, rng) for submit in random_requests(VOCAB)]


def _adjusted(submit: Submit, rng: random.Random) -> Submit:
    bias = {token: rng.uniform(-8.0, 8.0) for token in rng.sample(range(VOCAB), 30)}
    params = replace(
        submit.params,
        repetition_penalty=rng.choice((1.0, 0.8, 1.3, 2.0)),
        presence_penalty=rng.choice((0.0, -1.0, 2.0)),
        frequency_penalty=rng.choice((0.0, -0.3, 1.0)),
        logit_bias=rng.choice(({}, bias)),
        logprobs=rng.choice((None, 0, TOP)),
        prompt_logprobs=rng.choice((None, 0, TOP)),
    )
    return replace(submit, params=params)


def whole_logits(model: torch.nn.Module, prompt: list[int], output: list[int]) -> Tensor:
    """The reference's, float32 [n, vocab], after every token of prompt and output but the last."""
    with torch.inference_mode():
        return model(torch.tensor([[*prompt, *output[:-1]]])).logits[0].float()


def processed(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> Tensor:
    """One position's logits as `transformers` changes them; it has no presence and frequency."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        biases = [[[token], bias] for token, bias in params.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    changed = processors(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=len(changed))
    return (
        changed - params.frequency_penalty * counts - params.presence_penalty * (counts > 0).float()
    )


def check_tokens(logits: Tensor, submit: Submit, output: list[int]) -> int:
    """Each token is the best of the processed logits; how many could be another's."""
    prompt, close = submit.prompt, 0
    for i, token in enumerate(output):
        row = processed(logits[len(prompt) - 1 + i], submit.params, prompt, output[:i])
        behind = float(row.max() - row[token])
        assert behind <= SURE, f"{submit.id}: token {i} is {behind:.4f} behind the best"
        close += behind > 0
    return close


def check_scores(logits: Tensor, tokens: list[int], got: list[TokenLogprobs], top: int) -> None:
    """Of the model's own distribution, whatever the sampler made of it."""
    logprobs = logits.log_softmax(-1)
    assert [scored.token for scored in got] == tokens
    for row, scored in zip(logprobs, got, strict=True):
        own = float(row[scored.token])
        assert scored.logprob == pytest.approx(own, abs=SURE)
        assert int((row > own + SURE).sum()) < scored.rank <= int((row >= own - SURE).sum())
        assert len(scored.top) == top
        best = row.topk(top).values.tolist()
        assert [logprob for _, logprob in scored.top] == pytest.approx(best, abs=SURE)
        theirs = [float(row[token]) for token, _ in scored.top]
        assert theirs == pytest.approx(best, abs=2 * SURE)


@pytest.mark.parametrize(
    ("schedule", "pages"),
    [
        ("static-split-k3", SMALL),
        ("chunked-48", 400),
        pytest.param("every-layer", SMALL, marks=pytest.mark.full),
        pytest.param("prefill-first", 400, marks=pytest.mark.full),
    ],
)
def test_against_transformers(models, schedule: str, pages: int) -> None:
    """With look-ahead, in chunks, in layer slices, and with memory that runs out."""
    decoder, model = models
    submits = requests()
    served: Served = serve(
        decoder,
        schedules(LAYERS)[schedule](),
        submits,
        pages=pages,
        page_size=PAGE,
        running=16,
        prefix_cache=True,
    )
    assert bool(served.preemptions) == (pages == SMALL)
    close = tokens = 0
    for i, submit in enumerate(submits):
        params, output, prompt = submit.params, served.outputs[i], submit.prompt
        logits = whole_logits(model, prompt, output)
        close += check_tokens(logits, submit, output)
        tokens += len(output)
        if params.logprobs is not None:
            first = len(prompt) - 1
            check_scores(logits[first:], output, served.logprobs[i], params.logprobs)
        else:
            assert not served.logprobs[i]
        scored = served.prompt_logprobs[i]
        assert (scored is None) == (params.prompt_logprobs is None)
        if scored is not None:
            check_scores(logits[: len(prompt) - 1], prompt[1:], scored, params.prompt_logprobs or 0)
    assert close <= tokens // 200


def test_the_penalties_matter(models) -> None:
    """Most requests that have any answer otherwise than without."""
    decoder, _ = models
    submits = [s for s in requests() if s.params.penalises or s.params.logit_bias]
    plain = [
        replace(
            s, params=SamplingParams(temperature=0, max_tokens=s.params.max_tokens, ignore_eos=True)
        )
        for s in submits
    ]
    outputs = [
        serve(
            decoder,
            schedules(LAYERS)["prefill-first"](),
            asked,
            pages=400,
            page_size=PAGE,
            running=16,
            prefix_cache=True,
        ).outputs
        for asked in (submits, plain)
    ]
    different = sum(one != other for one, other in zip(*outputs, strict=True))
    assert different > len(submits) // 2


def test_a_long_prompt_is_scored_some_rows_at_a_time(models, monkeypatch) -> None:
    """The head's product is cut; the scores are the same."""
    decoder, model = models
    monkeypatch.setattr("twolane.lanes.cpu.runner.SCORED_LOGITS", 7 * VOCAB)
    rows: list[int] = []
    head = decoder.head
    monkeypatch.setattr(decoder, "head", lambda hidden: rows.append(len(hidden)) or head(hidden))
    submit = replace(
        random_requests(VOCAB)[0],
        params=SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=TOP, ignore_eos=True),
    )
    served = serve(
        decoder,
        schedules(LAYERS)["prefill-first"](),
        [submit],
        pages=400,
        page_size=PAGE,
        running=16,
        prefix_cache=True,
    )
    assert max(rows) == 7
    logits = whole_logits(model, submit.prompt, [0])
    scored = served.prompt_logprobs[0]
    assert scored is not None
    check_scores(logits[:-1], submit.prompt[1:], scored, TOP)
