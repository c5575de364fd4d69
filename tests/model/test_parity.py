"""Logits equal those of `transformers`, however the work is cut."""

import copy
import threading
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.checkpoints import load_decoder
from twolane.model.attention import Batch, Segment
from twolane.model.load.hub import resolve

from .checkpoints import BY_KIND, EVERY_KIND, FAMILIES, make_checkpoint, reference
from .passes import PAGE, Pool, close, expected, forward, in_chunks, prompt

CHUNKS = {
    "at once": [150],
    "token by token": [1] * 150,
    "chunked": [64, 64, 22],
    "odd chunks": [1, 60, 1, 1, 70, 2, 15],
    "prefill, then decode": [100, *[1] * 50],
}

families = pytest.mark.parametrize("family", FAMILIES)
by_kind = pytest.mark.parametrize("family", BY_KIND)
QUICK_CUT, MORE = "prefill, then decode", "odd chunks"
"""The cut of each family in the short form, and a further one of those of `EVERY_KIND`."""


@pytest.mark.parametrize(
    ("family", "cut"),
    [
        pytest.param(family, cut, marks=[] if quick else pytest.mark.full)
        for family, cut in product(FAMILIES, CHUNKS)
        for quick in [cut == QUICK_CUT or (family in EVERY_KIND and cut == MORE)]
    ],
)
def test_one_sequence(tiny, family, cut):
    decoder, model = tiny(family)
    tokens = prompt(150)
    close(in_chunks(decoder, tokens, CHUNKS[cut]), expected(model, tokens))


@families
def test_the_tiny_models_are_worth_comparing(tiny, family):
    """The best logit follows from the context, not from the last token, and lies clear."""
    decoder, _ = tiny(family)
    one, other = prompt(160, seed=0), prompt(160, seed=1)
    other[80:] = one[80:]
    logits = in_chunks(decoder, one, [160])
    best = logits.argmax(dim=1)
    assert (best == one).float().mean() < 0.2
    assert len(best.unique()) > 20
    changed = best != in_chunks(decoder, other, [160]).argmax(dim=1)
    assert changed[80:100].float().mean() > 0.3
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 1.0


@pytest.mark.full
@families
def test_errors_are_those_of_float32(tiny, family):
    """Against the reference in float64, our logits are no further off than the reference's own in
    float32: the order of operations and the types within norms and rotations lose nothing."""
    decoder, model = tiny(family)
    tokens = prompt(150)
    judge = copy.deepcopy(model).double()
    judge.set_experts_implementation("eager")
    want = judge(tokens[None]).logits[0]
    ours, theirs = (
        float((logits.double() - want).norm() / want.norm())
        for logits in (in_chunks(decoder, tokens, [100, *[1] * 50]), expected(model, tokens))
    )
    assert ours < 3e-6
    assert ours < 1.3 * theirs


@by_kind
def test_batch_of_mixed_segments(tiny, family):
    """Decode rows of many lengths, fresh prompts, chunks and a shared prefix in one pass."""
    decoder, model = tiny(family)
    pool = Pool(decoder)
    starts = [0, 5, 0, 40, 199, 24, 1, 63, 90, 3]
    news = [30, 1, 1, 25, 1, 40, 1, 1, 1, 1]
    sequences = [prompt(s + n, seed=i) for i, (s, n) in enumerate(zip(starts, news, strict=True))]
    pages = [pool.take(len(s)) for s in sequences]
    shared = decoder.spec.state is None  # a state belongs to one sequence
    if shared:
        sequences[5][:24] = sequences[3][:24]
        pages[5][:3] = pages[3][:3]
    slots = range(len(starts))
    for i, (tokens, start, own) in enumerate(zip(sequences, starts, pages, strict=True)):
        if start and not (shared and i == 5):
            forward(decoder, pool, [Segment(0, start, own, i)], [tokens[:start]])
    segments = [Segment(*parts) for parts in zip(starts, news, pages, slots, strict=True)]
    new = [tokens[start:] for tokens, start in zip(sequences, starts, strict=True)]
    for tokens, start, logits in zip(
        sequences, starts, forward(decoder, pool, segments, new), strict=True
    ):
        close(logits, expected(model, tokens)[start:])


@by_kind
def test_cut_after_each_layer(tiny, family):
    """A prefill stops after a layer, a decode step runs, one sequence leaves, it goes on."""
    decoder, model = tiny(family)
    sequences = [prompt(n, seed=n) for n in (33, 20, 47)]
    other = prompt(50, seed=9)
    want, want_other = [expected(model, t) for t in sequences], expected(model, other)
    for cut in range(1, decoder.spec.layers):
        pool = Pool(decoder, seed=cut)
        pages = [pool.take(len(t)) for t in sequences]
        other_pages = pool.take(50)
        forward(decoder, pool, [Segment(0, 49, other_pages, 3)], [other[:49]])
        segments = [
            Segment(0, len(t), p, i) for i, (t, p) in enumerate(zip(sequences, pages, strict=True))
        ]
        batch = Batch.build(segments, PAGE)
        hidden = decoder.embed(torch.cat(sequences))
        for i in range(cut):
            hidden = decoder.layer(i, hidden, batch, pool.kv)
        (step,) = forward(decoder, pool, [Segment(49, 1, other_pages, 3)], [other[49:]])
        close(step, want_other[49:])
        hidden = torch.cat([hidden[:33], hidden[53:]])
        batch = Batch.build([segments[0], segments[2]], PAGE)
        for i in range(cut, decoder.spec.layers):
            hidden = decoder.layer(i, hidden, batch, pool.kv)
        close(decoder.head(hidden), torch.cat([want[0], want[2]]))


@pytest.mark.parametrize("family", ["llama31", "qwen2-sliding", "qwen3", "qwen3.5"])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_cut_of_any_batch(tiny, family, data):
    """Sequences of any lengths move on by any number of tokens a pass."""
    decoder, model = tiny(family)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    sequences = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    pool = Pool(decoder)
    pages = [pool.take(n) for n in lengths]
    done = [0] * len(lengths)
    logits: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        left = [i for i, n in enumerate(lengths) if done[i] < n]
        chosen = data.draw(st.lists(st.sampled_from(left), unique=True, min_size=1))
        news = [data.draw(st.sampled_from([1, 7, lengths[i]])) for i in chosen]
        news = [min(n, lengths[i] - done[i]) for i, n in zip(chosen, news, strict=True)]
        segments = [Segment(done[i], n, pages[i], i) for i, n in zip(chosen, news, strict=True)]
        new = [sequences[s][done[s] : done[s] + n] for s, n in zip(chosen, news, strict=True)]
        for i, n, out in zip(chosen, news, forward(decoder, pool, segments, new), strict=True):
            logits[i].append(out)
            done[i] += n
    for tokens, parts in zip(sequences, logits, strict=True):
        close(torch.cat(parts), expected(model, tokens))


def test_layer_leaves_its_input_alone(tiny):
    decoder, _ = tiny("qwen3")
    pool = Pool(decoder)
    batch = Batch.build([Segment(0, 9, pool.take(9))], PAGE)
    hidden = decoder.embed(prompt(9))
    before = hidden.clone()
    decoder.layer(0, hidden, batch, pool.kv)
    assert torch.equal(hidden, before)


def test_two_threads_share_a_decoder(tiny):
    decoder, _ = tiny("llama31")
    prompts = [prompt(n, seed=n) for n in (120, 75)]
    want = [in_chunks(decoder, t, [40, *[1] * (len(t) - 40)]) for t in prompts]
    got: dict[int, torch.Tensor] = {}

    def run(index: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for _ in range(3):
                tokens = prompts[index]
                got[index] = in_chunks(decoder, tokens, [40, *[1] * (len(tokens) - 40)])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        close(got[i], want[i])


@pytest.mark.parametrize("shards", [1, 3])
def test_sharded_and_single_files(tmp_path, shards):
    path = make_checkpoint("qwen2", tmp_path / "model", seed=5, shards=shards)
    assert (path / "model.safetensors.index.json").is_file() == (shards > 1)
    tokens = prompt(40)
    close(
        in_chunks(load_decoder(resolve(str(path))), tokens, [40]), expected(reference(path), tokens)
    )


def test_half_precision_is_near(tmp_path):
    path = make_checkpoint("qwen3", tmp_path / "model", seed=2)
    source, tokens = resolve(str(path)), prompt(60)
    full = in_chunks(load_decoder(source), tokens, [50, *[1] * 10])
    half = load_decoder(source, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    logits = in_chunks(half, tokens, [50, *[1] * 10])
    assert logits.dtype == torch.float32
    assert (logits - full).abs().mean() < 0.1 * full.abs().mean()


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.3}])
def test_norms_after_a_rotation_undo_its_factor(tmp_path, more):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **more}
    sizes = {"rope_parameters": {"rope_theta": 10_000.0, **rope}}
    path = make_checkpoint("hunyuan", tmp_path / "model", sizes=sizes)
    tokens = prompt(60)
    ours = in_chunks(load_decoder(resolve(str(path))), tokens, [40, *[1] * 20])
    close(ours, expected(reference(path), tokens))
