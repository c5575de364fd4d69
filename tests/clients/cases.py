"""Clients' calls against a running server: `python cases.py BASE PACKAGE...`.

It runs in a virtual environment that has these packages. The server is one of `run.py`: its model
knows the answers to these questions by heart. Tools are strict where the clients make them so.
"""

import asyncio
import importlib.metadata
import json
import sys
import traceback

import frameworks  # noqa: F401  # adds to the calls
from shared import ASK, CASES, FINAL, MODEL, WEATHER, case, openai_client, user


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


@case("openai")
def tools_in_chat(base):
    api = openai_client(base)
    tools = [{"type": "function", "function": {"strict": True, **WEATHER}}]
    given = {"model": MODEL, "tools": tools, "reasoning_effort": "low", "service_tier": "auto"}
    asked = user(ASK)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        first = api.chat.completions.create(messages=asked, tool_choice=choice, **given)
        [call] = first.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Rome"}
    said = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    last = api.chat.completions.create(messages=[*asked, first.choices[0].message, said], **given)
    assert last.choices[0].message.content == FINAL


@case("openai")
def json_mode_and_streamed_tools(base):
    api = openai_client(base)
    form = {"type": "json_object"}
    made = api.chat.completions.create(
        model=MODEL, messages=user("Make a cat"), response_format=form
    )
    assert json.loads(made.choices[0].message.content) == {"name": "Tom", "age": 3}
    tools = [{"type": "function", "function": {"strict": True, **WEATHER}}]
    with api.chat.completions.stream(model=MODEL, messages=user(ASK), tools=tools) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == {"city": "Rome"}


@case("openai")
def refusals_with_their_reasons(base):
    import openai

    api = openai_client(base)
    for ask in (
        lambda: api.embeddings.create(model=MODEL, input="a"),
        lambda: api.moderations.create(input="a"),
        lambda: api.files.create(file=("a", b"a"), purpose="batch"),
        lambda: api.batches.create(
            input_file_id="a", endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ):
        try:
            ask()
        except openai.InternalServerError as error:
            assert error.status_code == 501
            assert "is not served" in error.message or "is served for" in error.message
        else:
            raise AssertionError("it is served")


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


@case("pydantic-ai-slim")
def output_in_three_ways(base):
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Cat(BaseModel):
        """A cat."""

        name: str
        age: int

    provider = OpenAIProvider(base_url=f"{base}/v1", api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider)
    for output, ask in (
        (NativeOutput(Cat), "Make a cat"),
        (PromptedOutput(Cat), "Make a cat"),
        (ToolOutput(Cat), "Finish a cat"),
    ):
        assert Agent(model, output_type=output).run_sync(ask).output == Cat(name="Tom", age=3)


@case("smolagents")
def tool_calling_agent(base):
    from smolagents import OpenAIServerModel, ToolCallingAgent

    model = OpenAIServerModel(MODEL, api_base=f"{base}/v1", api_key="none")
    agent = ToolCallingAgent(tools=[], model=model, verbosity_level=0)
    assert agent.run("Say it", max_steps=1) == "It is said."


@case("llm")
def schema_and_tool(base):
    import llm
    from llm.default_plugins.openai_models import Chat

    def weather(city: str) -> str:
        """Weather now."""
        return "21 degrees"

    model = Chat(
        MODEL,
        model_name=MODEL,
        api_base=f"{base}/v1",
        supports_schema=True,
        supports_tools=True,
    )
    model.key = "none"
    schema = llm.schema_dsl("name, age int")
    made = json.loads(model.prompt("Make a cat", schema=schema, stream=False).text())
    assert made == {"name": "Tom", "age": 3}
    assert model.chain(ASK, tools=[weather], stream=False).text().endswith(FINAL)


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


@case("openai-agents")
def agent_with_a_typed_answer(base):
    import openai
    from agents import Agent, Runner, function_tool, set_default_openai_api
    from agents import set_default_openai_client as set_client
    from pydantic import BaseModel

    class Cat(BaseModel):
        name: str
        age: int

    @function_tool
    def weather(city: str) -> str:
        """Weather now."""
        assert city == "Rome"
        return "Make a cat"

    for api in ("chat_completions", "responses"):
        set_default_openai_api(api)
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", max_retries=0)
        set_client(client, use_for_tracing=False)  # it belongs to one event loop
        agent = Agent(name="A", tools=[weather], output_type=Cat, model=MODEL)
        made = asyncio.run(Runner.run(agent, ASK)).final_output
        assert (made.name, made.age) == ("Tom", 3)


@case("instructor")
def models_by_three_modes(base):
    import instructor
    from pydantic import BaseModel

    class Cat(BaseModel):
        """A cat."""

        name: str
        age: int

    modes = instructor.Mode
    for mode, ask in (
        (modes.TOOLS, "Call a cat"),
        (modes.JSON, "Make a cat"),
        (modes.JSON_SCHEMA, "Make a cat"),
    ):
        api = instructor.from_openai(openai_client(base), mode=mode)
        made = api.chat.completions.create(model=MODEL, messages=user(ask), response_model=Cat)
        assert (made.name, made.age) == ("Tom", 3), mode


@case("llama-index-llms-openai-like")
def structured_model_and_tool(base):
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Cat(BaseModel):
        """A cat."""

        name: str
        age: int

    def weather(city: str) -> str:
        """Weather now."""
        return "21 degrees"

    llm = OpenAILike(
        model=MODEL,
        api_base=f"{base}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )
    made = llm.as_structured_llm(Cat).chat([ChatMessage(role="user", content="Call a cat")]).raw
    assert (made.name, made.age) == ("Tom", 3)
    tool = FunctionTool.from_defaults(weather)
    asked = ChatMessage(role="user", content=ASK)
    first = llm.chat_with_tools([tool], chat_history=[asked])
    [call] = llm.get_tool_calls_from_response(first)
    assert call.tool_kwargs == {"city": "Rome"}
    said = ChatMessage(
        role="tool",
        content=str(tool(**call.tool_kwargs)),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    last = llm.chat_with_tools([tool], chat_history=[asked, first.message, said])
    assert last.message.content == FINAL


@case("litellm")
def schema_and_tool_by_two_providers(base):
    import litellm
    from pydantic import BaseModel

    class Cat(BaseModel):
        name: str
        age: int

    tools = [{"type": "function", "function": WEATHER}]
    for provider in ("openai", "hosted_vllm"):
        given = {"model": f"{provider}/{MODEL}", "api_base": f"{base}/v1", "api_key": "none"}
        made = litellm.completion(**given, messages=user("Make a cat"), response_format=Cat)
        assert Cat.model_validate_json(made.choices[0].message.content) == Cat(name="Tom", age=3)
        first = litellm.completion(**given, messages=user(ASK), tools=tools).choices[0].message
        [call] = first.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        said = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
        history = [*user(ASK), first.model_dump(exclude_none=True), said]
        last = litellm.completion(**given, messages=history, tools=tools)
        assert last.choices[0].message.content == FINAL


@case("litellm")
def responses_by_its_bridge(base):
    import litellm

    given = {"model": f"openai/{MODEL}", "api_base": f"{base}/v1", "api_key": "none"}
    answer = litellm.responses(**given, input="Make a cat")
    assert "Tom" in answer.output[0].content[0].text


def main() -> int:
    base, *names = sys.argv[1:]
    failed = 0
    for package, function in CASES:
        if package not in names:
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
