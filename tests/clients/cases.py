"""Every client's calls against a running server: `python cases.py BASE [NAME...]`.

It runs in the clients' own virtual environment. The server is one of `serve.py`: its model knows
the answers to these questions by heart.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import traceback

os.environ.update(OPENAI_API_KEY="none", OPENAI_AGENTS_DISABLE_TRACING="1")
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


@case("openai")
def parsed_answer(base):
    from pydantic import BaseModel

    class Cat(BaseModel):
        name: str
        age: int

    api = openai_client(base)
    chat = api.chat.completions.parse(model=MODEL, messages=user("Make a cat"), response_format=Cat)
    response = api.responses.parse(model=MODEL, input="Make a cat", text_format=Cat)
    assert chat.choices[0].message.parsed == response.output_parsed == Cat(name="Tom", age=3)


@case("openai")
def tools_in_responses(base):
    api = openai_client(base)
    tools = [{"type": "function", "strict": True, **WEATHER}]
    first = api.responses.create(model=MODEL, input=ASK, tools=tools)
    [call] = first.output
    assert json.loads(call.arguments) == {"city": "Rome"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    last = api.responses.create(
        model=MODEL, input=[result], tools=tools, previous_response_id=first.id
    )
    assert last.output_text == FINAL


@case("anthropic")
def tool_runner(base):
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather now.

        Args:
            city: where.
        """
        assert city == "Rome"
        return "21 degrees"

    api = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    runner = api.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, messages=user(ASK), tools=[weather], thread=False
    )
    assert runner.until_done().content[-1].text == FINAL


@case("langchain-openai")
def structured_output_in_three_ways(base):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Cat(BaseModel):
        """A cat."""

        name: str
        age: int

    model = ChatOpenAI(model=MODEL, base_url=f"{base}/v1", max_retries=0)
    for method, ask in (
        ("json_schema", "Make a cat"),
        ("json_mode", "Make a cat"),
        ("function_calling", "Call a cat"),
    ):
        made = model.with_structured_output(Cat, method=method).invoke(ask)
        assert (made.name, made.age) == ("Tom", 3), method


@case("langchain-openai")
def bound_tools(base):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: str) -> str:
        """Weather now."""
        return "21 degrees"

    for responses in (False, True):
        model = ChatOpenAI(
            model=MODEL, base_url=f"{base}/v1", max_retries=0, use_responses_api=responses
        ).bind_tools([weather])
        first = model.invoke([HumanMessage(ASK)])
        [call] = first.tool_calls
        assert call["args"] == {"city": "Rome"}
        said = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        assert model.invoke([HumanMessage(ASK), first, said]).text == FINAL


@case("pydantic-ai-slim")
def agent_with_a_tool(base):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{base}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL, provider=provider))

        @agent.tool_plain
        def weather(city: str) -> str:
            """Weather now."""
            assert city == "Rome"
            return "21 degrees"

        assert agent.run_sync(ASK).output == FINAL


@case("openai-agents")
def default_agent(base):
    import openai
    from agents import Agent, Runner, function_tool, set_default_openai_client

    @function_tool
    def weather(city: str) -> str:
        """Weather now."""
        assert city == "Rome"
        return "21 degrees"

    api = openai.AsyncOpenAI(base_url=f"{base}/v1", max_retries=0)
    set_default_openai_client(api, use_for_tracing=False)
    agent = Agent(name="A", instructions="Be brief.", tools=[weather], model=MODEL)
    assert asyncio.run(Runner.run(agent, ASK)).final_output == FINAL


def main() -> int:
    base, *names = sys.argv[1:]
    failed = 0
    for package, function in CASES:
        if names and package not in names:
            continue
        try:
            function(base)
            ended = "works"
        except Exception as error:
            failed += 1
            ended = f"FAILS: {error!r}"[:300]
            traceback.print_exc()
        version = importlib.metadata.version(package)
        print(f"{package} {version} | {function.__name__} | {ended}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
