"""Answer many prompts without a server, and write a line of JSON for each.

    python offline_batch.py > answers.jsonl

All prompts are in flight at the same time, and share the keys and values of what they begin with.
Each answer is one of three words, which a grammar enforces. Its probability is that of the first
token, as the model itself has it.
"""

import json
import math
import sys

from twolane import LLM, SamplingParams

MODEL = "smollm2-135m-instruct"
QUESTION = "Is this review positive, negative or neutral? Answer with one word.\n\n"
REVIEWS = (
    "I loved every minute of it.",
    "The worst meal of my life.",
    "It arrived on a Tuesday.",
    "Great value, and it works well.",
    "It broke after a day, and nobody answered.",
)
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=8,
    logprobs=0,
    grammar='start: "positive" | "negative" | "neutral"',
)


def main(model: str = MODEL, **settings: object) -> None:
    """Print a line for each review."""
    conversations = [[{"role": "user", "content": QUESTION + review}] for review in REVIEWS]
    with LLM(model, **settings) as llm:
        answers = llm.chat(conversations, PARAMS)
    for review, answer in zip(REVIEWS, answers, strict=True):
        assert answer.outputs[0].logprobs is not None
        likely = math.exp(answer.outputs[0].logprobs[0].logprob)
        print(
            json.dumps({"review": review, "answer": answer.text, "probability": round(likely, 3)})
        )
    reused = sum(answer.cached_tokens for answer in answers)
    print(f"{reused} prompt tokens came from the prefix cache", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
