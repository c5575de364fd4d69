"""What the calls of clients share: the questions that the model knows, and the list of calls."""

import os

os.environ.update(
    OPENAI_API_KEY="none",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    CREWAI_DISABLE_TELEMETRY="true",
    HAYSTACK_TELEMETRY_ENABLED="False",
    MEM0_TELEMETRY="False",
)
MODEL, ASK = "parrot", "What is the weather in Rome?"
FINAL = "It is 21 degrees in Rome."
WEATHER = {
    "name": "weather",
    "description": "Weather now",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CASES = []


def case(package):
    """Mark a function as a call of this package's client."""

    def add(function):
        CASES.append((package, function))
        return function

    return add


def user(text):
    return [{"role": "user", "content": text}]


def openai_client(base):
    import openai

    return openai.OpenAI(base_url=f"{base}/v1", max_retries=0)
