"""An agent with tools: the model asks for them over OpenAI's API, and this program runs them.

    twolane serve smollm2-135m-instruct          # in another terminal
    python agent.py "What is the weather in Paris?"

It needs nothing but Python; OpenAI's own client sends the same bodies. A model that was trained to
call tools would choose them by `"tool_choice": "auto"` in every turn. Here the first turn asks for
a call, so that the smallest model makes one, too: a grammar enforces its name and arguments.
"""

import json
import os
import sys
import urllib.request
from typing import Any

ADDRESS = os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1")
QUESTION = "What is the weather in Paris?"
TURNS = 4
"""Most answers of the model to one question."""

CITIES = {"Paris": (17, "light rain"), "Lima": (22, "fog"), "Oslo": (3, "snow")}


def weather(city: str) -> dict[str, Any]:
    """Return what a real tool would look up."""
    degrees, sky = CITIES[city]
    return {"city": city, "degrees_celsius": degrees, "sky": sky}


TOOLS = {weather.__name__: weather}
DESCRIBED = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The present weather of a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": list(CITIES)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def main(question: str = QUESTION) -> None:
    """Ask, run the tools that the model calls, and print each step."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    print(f"user: {question}")
    for turn in range(TURNS):
        answer = ask(messages, "auto" if turn else "required")
        messages.append(answer)
        if not answer.get("tool_calls"):
            print(f"model: {answer['content']}")
            return
        for call in answer["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = json.dumps(TOOLS[name](**arguments))
            print(f"tool: {name}({arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print("model: (it asked for tools until the end)")


def ask(messages: list[dict[str, Any]], choice: str) -> dict[str, Any]:
    """Return the model's next message."""
    body = {
        "messages": messages,
        "tools": DESCRIBED,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 96,
    }
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        f"{ADDRESS}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
        return message


if __name__ == "__main__":
    main(*sys.argv[1:])
