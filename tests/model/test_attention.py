"""Where attention reads keys and values: pages of a sequence that are neighbours are not copied."""

import pytest
import torch

from tests.model.checkpoints import load_decoder, make_checkpoint
from tests.model.passes import in_chunks, prompt
from twolane.model.attention import Batch, Segment
from twolane.model.load.hub import resolve


@pytest.mark.parametrize("family", ["qwen3", "qwen2-sliding", "gpt-oss"])
def test_pages_that_are_neighbours_give_the_same(tmp_path, family):
    """To the last bit, in chunks of prompts and in decode steps, with windows and with sinks."""
    decoder = load_decoder(resolve(str(make_checkpoint(family, tmp_path))))
    tokens, chunks = prompt(70), [37, 20, 10, 1, 1, 1]
    scattered, together = (in_chunks(decoder, tokens, chunks, seed) for seed in (0, None))
    assert torch.equal(scattered, together)


def test_neighbours_are_read_in_place():
    def slots(*segments):
        return [part.slots for part in Batch.build(segments, 4)._plan(None, 0, torch.float32)]

    assert slots(Segment(5, 1, [2, 3])) == [slice(8, 14)]
    assert slots(Segment(5, 2, [2, 3])) == [slice(8, 15)]
    assert slots(Segment(0, 6, [3, 2])) == [None]
    (apart,) = slots(Segment(5, 1, [3, 2]))
    assert apart.tolist() == [12, 13, 14, 15, 8, 9]
    (rows,) = slots(Segment(1, 1, [0]), Segment(1, 1, [1]))
    assert rows.tolist() == [0, 1, 4, 5]
