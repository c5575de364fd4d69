"""The budget of thinking, against the rule written out."""

import random
from array import array

from twolane.engine.constrained.banned import Banned
from twolane.engine.constrained.bits import every_token
from twolane.engine.constrained.thinking import ThinkingBudget

BEGIN, END, WORDS = 3, 4, (8, 9)
EVERY = every_token(16)


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(16) if mask[token // 8] >> token % 8 & 1}


def forces_end(prompt: list[int], output: list[int], budget: int) -> bool:
    """Whether the thinking is open after the output and has as many tokens as the budget."""
    first = len(prompt) - prompt[::-1].index(BEGIN) if BEGIN in prompt else None
    if first is not None and END in prompt[first:]:
        first = None
    if first is None:
        if BEGIN not in output:
            return False
        first = len(prompt) + output.index(BEGIN) + 1
    whole = prompt + output
    begun = max(first, len(prompt))
    return END not in whole[begun:] and len(whole) - first >= budget


def test_the_end_of_thinking_is_forced_when_its_budget_is_spent() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(2000):
        prompt = rng.choices((BEGIN, END, *WORDS), k=rng.randint(1, 5))
        budget, output = rng.randint(0, 4), list[int]()
        other = Banned([(8, 9)], EVERY) if rng.random() < 0.5 else None
        rule = ThinkingBudget(budget, (BEGIN, END), array("q", prompt), EVERY, other)
        for _ in range(rng.randint(0, 9)):
            tokens = array("q", prompt + output)
            mask = rule.mask(tokens, len(prompt))
            forced = forces_end(prompt, output, budget)
            left = {*range(16)} - ({9} if other and output[-1:] == [8] else set())
            assert allowed(mask) == ({END} if forced else left)
            if rule.free:
                assert other is None
                assert mask == EVERY
                assert not rule.changes
            seen.add((forced, rule.changes, rule.free))
            choices = [token for token in (BEGIN, END, *WORDS) if token in allowed(mask)]
            output.append(rng.choice(choices))
    ended = {(False, True, False), (False, False, True)}
    assert seen == {(True, True, False), *ended}


def test_masks_do_not_depend_on_which_of_them_are_asked_for() -> None:
    """A step may bring several tokens."""
    output = [BEGIN, 8, 8, 9]
    rules = [ThinkingBudget(3, (BEGIN, END), array("q", [9]), EVERY, None) for _ in range(2)]
    for length in range(len(output) + 1):
        one = rules[0].mask(array("q", [9, *output[:length]]), 1)
    assert one == rules[1].mask(array("q", [9, *output]), 1)
    assert allowed(one) == {END}
