"""Sequences that an output must not contain, against the rule written out."""

import random
from array import array

from twolane.engine.constrained.banned import Banned


def test_the_last_token_of_a_sequence_is_masked_behind_its_others_in_the_output() -> None:
    rng = random.Random(0)

    def some(least: int, most: int) -> list[int]:
        return [rng.choice((3, 8, 9)) for _ in range(rng.randint(least, most))]

    seen = set()
    for _ in range(500):
        sequences = [some(1, 4) for _ in range(rng.randint(1, 4))]
        prompt, output = some(1, 4), some(0, 6)
        banned = Banned(sequences, b"\xff\xfd")
        mask = banned.mask(array("q", prompt + output), len(prompt))
        left = {token for token in range(16) if mask[token // 8] >> token % 8 & 1}
        ends = {
            last
            for *begin, last in sequences
            if output[len(output) - len(begin) :] == begin and len(begin) <= len(output)
        }
        assert left == {*range(16)} - {9} - ends
        assert banned.changes == any(len(each) > 1 for each in sequences)
        seen.add(len(ends))
    assert seen >= {0, 1, 2}
