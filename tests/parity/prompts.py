"""What is asked: random token ids of every length, and real text."""

import random
from collections.abc import Callable
from typing import Any

import torch

from twolane.engine.messages import Submit
from twolane.sampling import SamplingParams

MAX_TOKENS = 24

LENGTHS = (512, 20, 1, 489, 37, 8, 500, 16, 9, 33, 505, 28, 7, 2, 460, 64, 65, 3, 63, 130)
LENGTHS += (24, 40, 17, 31, 15, 5, 56, 48, 10, 23, 32, 25, 6, 14, 41, 127, 4, 12, 19, 11)
LENGTHS += (300, 160, 511, 96, 240, 128, 13, 370, 80, 200)
"""Long ones before short ones, so that two together outgrow a pool that is made for one; then
many short ones, which run together and outgrow it at the same time."""


def random_requests(vocab: int) -> list[Submit]:
    """A request of each length. Two of three begin with one of two texts; some are repeated."""
    rng = random.Random(0)
    texts = [[rng.randrange(3, vocab) for _ in range(512)] for _ in range(2)]
    requests = []
    for i, length in enumerate(LENGTHS):
        shared = texts[i % 3][: rng.choice((24, 90, 512))] if i % 3 < 2 else []
        own = [rng.randrange(3, vocab) for _ in range(length)]
        tokens = 1 if i % 10 == 9 else rng.randint(6, 16) if i % 5 == 4 else MAX_TOKENS
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        requests.append(Submit(f"r{i}", (shared + own)[:length], params))
    return requests


def conversation(model: Callable[..., Any], turns: int) -> list[Submit]:
    """Turns of a user who says some random tokens each time; `model` of `transformers` answers."""
    rng = random.Random(0)
    said, asked = list[int](), list[Submit]()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for turn in range(turns):
        said += [rng.randrange(3, 250) for _ in range(rng.randint(1, 12))]
        asked.append(Submit(f"turn {turn}", list(said), params))
        for _ in range(params.max_tokens):
            with torch.inference_mode():
                said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return asked


_GUIDE = """You are the assistant of a small museum of railways in a valley. You answer visitors \
in at most three sentences, politely and without guessing. The museum is open from Tuesday to \
Sunday, from ten in the morning to five in the afternoon; on Mondays only the garden is open. \
A ticket costs nine euros for adults and four euros for children under fourteen; children under \
six pay nothing. The oldest engine, built in 1868, stands in the round house and may be touched. \
The long train, with its dining car of 1927 and its mail car of 1931, leaves the platform at \
eleven, at one and at three o'clock and comes back after forty minutes; seats in the dining car \
are reserved at the desk. Dogs are welcome everywhere except in the dining car. Photographs are \
allowed without a flash. There is a workshop for children on Saturdays, where they build a signal \
that works, and a library that opens on request. The last bus to the town leaves at half past \
five from the square in front of the station. If you do not know an answer, say so and name the \
desk, which has a telephone."""

_ARTICLE = """The harbour town had two bridges, and for a hundred years everybody who wanted to \
cross the water in the morning met everybody else who wanted the same. Carts with fish stood \
behind carts with bread, the bread grew cold and the fish grew warm, and the toll keeper, who \
was paid by the cart and not by the hour, saw no reason to hurry. In the spring of 1894 the \
council asked an engineer from the capital what could be done. She did not draw a third bridge. \
She counted. For eleven days she sat at the window of the inn with a notebook and a watch, and \
wrote down when each cart came, how long it waited and what it carried. Then she gave the \
council one page. Heavy carts, she wrote, were few and slow, and each of them held up a dozen \
light ones; but the heavy carts were in no hurry, for stone and timber do not spoil, while the \
light ones were. Paint a line along the middle of each bridge, she wrote, and let the heavy \
carts keep to the side of the river mouth. When no heavy cart is in sight, let the others use \
the whole width. The council laughed, because the page had cost them forty crowns, but paint is \
cheap and a line was painted. By the summer the bakers sold warm bread on the far side of the \
water. By the autumn the toll keeper asked to be paid by the hour. The engineer came back once, \
in the winter, to count again: the heavy carts were a little slower than before, the light ones \
waited a fifth as long, and more of both went over the water than ever. Asked what she would \
change, she said that the line should move: closer to the river mouth in the early morning, \
when the fish came in, and closer to the hill at noon, when the quarry sent its stone. Nobody \
had thought of that. A boy with a bucket of paint and a broom, she said, would do."""

_FUNCTION = '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list, keeping equal elements in order."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
'''

_REVIEW = """Here is a function in C. What does it return for n = 10, and is there a bug?

```c
#include <stddef.h>

static long fib(size_t n)
{
    long a = 0, b = 1;
    for (size_t i = 0; i < n; i++) {
        long next = a + b;
        a = b;
        b = next;
    }
    return a;
}
```"""

CHATS = (
    (None, "What is the capital of France?"),
    (None, "Hi!"),
    (None, "Explain in two sentences why the sky is blue."),
    (None, "Write a haiku about two trains that share one track."),
    (None, _REVIEW),
    (None, f"Summarise this story in one sentence.\n\n{_ARTICLE}"),
    (None, "Erkläre einem Kind, warum der Mond nicht auf die Erde fällt."),
    (None, "¿Cuáles son los ingredientes de una tortilla de patatas?"),
    (None, "请用一句话介绍长城。"),
    (_GUIDE, "We are two adults and a girl of five. What do the tickets cost?"),
    (_GUIDE, "May our dog ride in the dining car?"),
    (_GUIDE, "May our dog ride in the mail car?"),
)
"""(system prompt, question), for the chat template."""

TEXTS = (
    "The",
    "Once upon a time, in a town with two bridges,",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    _FUNCTION,
    "SELECT name, COUNT(*) AS orders\nFROM customers\nJOIN",
    "Les trains de nuit ont un charme particulier, parce que",
    "Москва — столица России. Париж — столица",
    f"{_ARTICLE}\n\nThe moral of this story is that",
)
"""Plain, to be continued."""
