"""Agents that make README's own model call tools, which its chat template does not show.

    PYTHON own_model.py BASE

Arguments have few values: a model of 135M does not find the end of a text by itself.
"""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

MODEL = "smollm2-135m-instruct"
ASK = "What is the weather in Rome?"
City = Literal["Rome", "Oslo"]
CITIES = ("Rome", "Oslo")


def openai_agents(base: str) -> None:
    """A named and a `required` call, by both APIs, each with a turn after it."""
    import openai
    from agents import Agent, ModelSettings, Runner, function_tool
    from agents import set_default_openai_api as set_api
    from agents import set_default_openai_client as set_client

    called: list[str] = []

    @function_tool
    def weather(city: City) -> str:
        """Weather now."""
        called.append(city)
        return "21 degrees"

    for api in ("chat_completions", "responses"):
        set_api(api)
        for choice in ("required", "weather"):
            settings = ModelSettings(
                tool_choice=choice, max_tokens=60, temperature=0, parallel_tool_calls=False
            )
            how = {"tools": [weather], "model": MODEL, "model_settings": settings}
            if api == "responses":  # whose answers must not end at a limit
                how["tool_use_behavior"] = "stop_on_first_tool"
            agent = Agent(name="A", **how)
            client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
            set_client(client, use_for_tracing=False)  # it belongs to one event loop
            assert asyncio.run(Runner.run(agent, ASK)).final_output
            assert called
            assert called.pop() in CITIES


def pydantic_ai_slim(base: str) -> None:
    """An output by a tool, which is a `required` call."""
    from pydantic import BaseModel
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel):
        """The weather somewhere."""

        city: City
        sunny: bool

    provider = OpenAIProvider(base_url=f"{base}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL, provider=provider), output_type=ToolOutput(Weather))
        made = agent.run_sync(ASK, model_settings={"max_tokens": 60, "temperature": 0})
        assert made.output.city in CITIES


def langchain_openai(base: str) -> None:
    """A named and a `required` call, streamed and not."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: City) -> str:
        """Weather now."""
        return "21 degrees"

    limits = {"max_tokens": 60, "temperature": 0, "max_retries": 0}
    model = ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="none", **limits)
    for choice in ("weather", "any"):
        bound = model.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        whole, (first, *rest) = bound.invoke(ASK), bound.stream(ASK)
        streamed = sum(rest, first)
        for message in (whole, streamed):
            [call] = message.tool_calls
            assert call["name"] == "weather"
            assert call["args"]["city"] in CITIES


def main() -> int:
    """Run all; return how many fail."""
    failed = 0
    for agent in (openai_agents, pydantic_ai_slim, langchain_openai):
        name = agent.__name__.replace("_", "-")
        try:
            agent(sys.argv[1])
            result = "works"
        except Exception as error:
            failed, result = failed + 1, f"FAILS: {type(error).__name__}: {error}"
        print(f"{name} {version(name)} | tools on {MODEL} | {result}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
