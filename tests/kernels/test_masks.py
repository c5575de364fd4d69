"""Masks on the device: the tokens that a launch allows are chosen from, and only in that launch."""

import random

import torch

from twolane.kernels.sampling import MAX_BANNED
from twolane.lanes.cpu.sampler import Adjustment, broken_rows, token_mask
from twolane.lanes.cuda.logit_processors import LogitProcessors
from twolane.lanes.sampling_points import SamplingPoint
from twolane.lanes.slot_table import SlotTable
from twolane.lanes.work import Sampling, SlotUpdate, TokenMask
from twolane.sampling import SamplingParams

VOCAB, SLOTS = 75, 4


def processors():
    slots = SlotTable(SLOTS)
    sampling = Sampling(SamplingParams(), 0, 1, ())
    slots.take([SlotUpdate(slot, 0, (slot,), sampling) for slot in range(SLOTS)])
    return LogitProcessors(slots, VOCAB, torch.device("cpu"))


def masks_of(slots, seed):
    rng = random.Random(seed)
    return [TokenMask(slot, rng.randbytes(-(-VOCAB // 8))) for slot in slots]


def test_masked_rows_keep_what_is_allowed_and_others_everything():
    made, points = processors(), [SamplingPoint(row, slot, 5) for row, slot in enumerate((3, 0, 1))]
    masks = masks_of((0, 1), seed=1)
    made.constrain(masks)
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    made.adjust(logits, made.asked(points))
    assert torch.equal(logits[0], before[0])
    for row, mask in zip((1, 2), masks, strict=True):
        allowed = token_mask(mask.allowed, VOCAB)
        assert torch.equal(logits[row][allowed], before[row][allowed])
        assert (logits[row][~allowed] == -torch.inf).all()


def test_a_mask_holds_for_one_launch():
    """A slot that is freed, or decodes freely next, finds no mask of the launch before."""
    made, points = processors(), [SamplingPoint(0, 2, 5)]
    made.constrain(masks_of((2,), seed=2))
    made.adjust(torch.randn(1, VOCAB), made.asked(points))
    assert made.asked(points) == []


def test_what_a_mask_would_hide_is_still_broken():
    """NaN and plus infinity reach the sampler as the model gives them; minus infinity is none."""
    made, points = processors(), [SamplingPoint(row, row, 5) for row in range(4)]
    made.constrain([TokenMask(slot, bytes([1])) for slot in range(4)])
    logits = torch.randn(4, VOCAB)
    logits[1, 30], logits[2, 74], logits[3, 9] = torch.nan, torch.inf, -torch.inf
    made.adjust(logits, made.asked(points))
    assert broken_rows(logits) == [1, 2]


def test_biases_and_bans_of_all_rows_are_those_of_each(monkeypatch):
    """Whatever number of tokens a slot has, and after another request had the slot."""
    monkeypatch.setattr("twolane.lanes.cuda.logit_processors.MAX_BIASED_TOKENS", 40)
    slots, rng = SlotTable(SLOTS), random.Random(0)
    made = LogitProcessors(slots, VOCAB, torch.device("cpu"))
    for count in (40, 3, 0, 17):
        asked = [
            Sampling(
                SamplingParams(
                    logit_bias={t: rng.uniform(-9, 9) for t in rng.sample(range(VOCAB), biased)},
                    stop_token_ids=tuple(rng.sample(range(1, VOCAB), banned)),
                    min_tokens=4,
                ),
                *(0, 3, (0,)),
            )
            for biased, banned in ((count, 30), (1, count), (0, 0), (40 - count, 9))
        ]
        slots.take([SlotUpdate(slot, 0, (slot,), each) for slot, each in enumerate(asked)])
        points = [SamplingPoint(row, 3 - row, (3, 6, 7)[row]) for row in range(3)]
        made.begin([SamplingPoint(row, row, 3) for row in range(SLOTS)])
        logits = torch.randn(3, VOCAB)
        expected = logits.clone()
        for point in points:
            sampling, row = asked[point.slot], expected[point.row]
            Adjustment(sampling.params, (), ()).apply(row)
            if len(banned := sampling.banned(point.position)) > MAX_BANNED:
                row[list(banned)] = -torch.inf
        made.adjust(logits, made.asked(points))
        assert torch.equal(logits, expected)
