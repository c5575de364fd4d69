"""Calls of frameworks that build on clients: agents, constrained programs, evaluations."""

import asyncio
import json
import logging

from shared import ASK, FINAL, MODEL, WEATHER, case, openai_client, user

CAT = {"name": "Tom", "age": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def cat_model():
    from pydantic import BaseModel

    class Cat(BaseModel):
        """A cat."""

        name: str
        age: int

    return Cat


def weather(city: str) -> str:
    """Weather now.

    Args:
        city: The name of the city.
    """
    assert city == "Rome"
    return "21 degrees"


@case("huggingface_hub")
def chat_stream_schema_and_tools(base):
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=f"{base}/v1", api_key="none")
    given = {"model": MODEL, "max_tokens": 60}
    pieces = client.chat_completion(user("21 degrees"), **given, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == FINAL
    said = client.chat_completion(user("Make a cat"), **given, logprobs=True)
    assert said.choices[0].logprobs.content
    form = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA}}
    for wanted in (form, {"type": "json_object", "value": SCHEMA}):
        said = client.chat_completion(user("Make a cat"), **given, response_format=wanted)
        assert json.loads(said.choices[0].message.content) == CAT
    tools = [{"type": "function", "function": WEATHER}]
    for choice in ("auto", "required"):
        said = client.chat_completion(user(ASK), **given, tools=tools, tool_choice=choice)
        [call] = said.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Rome"}


@case("outlines")
def three_kinds_of_server(base):
    import outlines
    from outlines.types import Regex

    made = cat_model()
    for kind in (outlines.from_openai, outlines.from_vllm, outlines.from_sglang):
        model = kind(openai_client(base), MODEL)
        assert model("21 degrees", max_tokens=60) == FINAL, kind
        assert made.model_validate_json(model("Make a cat", made, max_tokens=60)).age == 3, kind
        if kind is not outlines.from_openai:
            assert model("Make a cat", Regex(r"\{.*\}"), max_tokens=60).startswith("{"), kind


@case("guidance")
def programs_on_two_kinds_of_server(base):
    import guidance
    from guidance.models.experimental import VLLMModel

    given = {"model": MODEL, "base_url": f"{base}/v1", "api_key": "none", "echo": False}
    model = guidance.models.OpenAI(**given)
    with guidance.user():
        model += "Make a cat"
    with guidance.assistant():
        model += guidance.json("cat", schema=SCHEMA, max_tokens=60)
    assert json.loads(model["cat"]) == CAT
    model = VLLMModel(**given)
    with guidance.user():
        model += "Make a cat"
    with guidance.assistant():
        model += guidance.select(["yes", "no"], name="chosen")
    with guidance.user():
        model += "Make a cat"
    with guidance.assistant():
        model += guidance.gen("matched", regex="[a-c]{2}")
    assert model["chosen"] in ("yes", "no")
    assert set(model["matched"]) <= set("abc")


@case("haystack-ai")
def generators_and_an_agent(base):
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import (
        OpenAIChatGenerator,
        OpenAIResponsesChatGenerator,
    )
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    given = {"api_key": Secret.from_token("none"), "model": MODEL, "api_base_url": f"{base}/v1"}
    tool = create_tool_from_function(weather)
    for kind in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
        pieces = []
        said = kind(**given, streaming_callback=pieces.append).run(
            [ChatMessage.from_user("21 degrees")]
        )
        assert said["replies"][0].text == FINAL
        assert pieces
        agent = Agent(chat_generator=kind(**given), tools=[tool])
        assert agent.run(messages=[ChatMessage.from_user(ASK)])["last_message"].text == FINAL
    strict = OpenAIChatGenerator(
        **given, generation_kwargs={"response_format": cat_model()}, tools=None
    )
    said = strict.run([ChatMessage.from_user("Make a cat")])["replies"][0]
    assert json.loads(said.text) == CAT


@case("langgraph")
def agent_whole_and_streamed(base):
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    made = cat_model()
    for responses in (False, True):
        model = ChatOpenAI(
            model=MODEL, base_url=f"{base}/v1", max_retries=0, use_responses_api=responses
        )
        agent = create_agent(model, tools=[tool(weather)])
        asked = {"messages": user(ASK)}
        assert agent.invoke(asked)["messages"][-1].text == FINAL
        pieces = agent.stream(asked, stream_mode="messages")
        assert FINAL in "".join(piece.text for piece, _ in pieces)
        strict = create_agent(model, tools=[], response_format=ProviderStrategy(made))
        found = strict.invoke({"messages": user("Make a cat")})["structured_response"]
        assert (found.name, found.age) == ("Tom", 3)


@case("agno")
def agents_of_two_kinds(base):
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike
    from agno.models.vllm import VLLM

    for kind in (OpenAILike, VLLM):
        model = kind(id=MODEL, base_url=f"{base}/v1", api_key="none")
        agent = Agent(model=model, tools=[weather], telemetry=False)
        assert agent.run(ASK).content.endswith(FINAL), kind
    model = OpenAILike(id=MODEL, base_url=f"{base}/v1", api_key="none")
    strict = Agent(model=model, output_schema=cat_model(), telemetry=False)
    assert strict.run("Make a cat").content.age == 3


@case("inspect-ai")
def providers_with_tools_and_schema(base):
    from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema, get_model
    from inspect_ai.tool import ToolInfo, ToolParams
    from inspect_ai.util import json_schema

    known = ToolInfo(
        name="weather",
        description="Weather now",
        parameters=ToolParams(
            properties={"city": json_schema(str)}, required=["city"], additionalProperties=False
        ),
    )
    schema = ResponseSchema(name="cat", json_schema=json_schema(cat_model()))

    async def run():
        for provider in ("openai-api/twolane", "vllm"):
            model = get_model(
                f"{provider}/{MODEL}",
                base_url=f"{base}/v1",
                api_key="none",
                config=GenerateConfig(max_retries=0, max_tokens=60),
            )
            said = await model.generate([ChatMessageUser(content=ASK)], tools=[known])
            [call] = said.message.tool_calls
            assert call.arguments == {"city": "Rome"}, provider
            said = await model.generate(
                [ChatMessageUser(content="Make a cat")],
                config=GenerateConfig(response_schema=schema, logprobs=True, top_logprobs=2),
            )
            assert json.loads(said.completion) == CAT, provider
            assert said.choices[0].logprobs.content

    asyncio.run(run())


@case("mem0ai")
def language_models_of_two_kinds(base):
    from mem0.utils.factory import LlmFactory

    for kind, address in (("openai", "openai_base_url"), ("vllm", "vllm_base_url")):
        llm = LlmFactory.create(
            kind, {"model": MODEL, "api_key": "none", address: f"{base}/v1", "max_tokens": 60}
        )
        assert llm.generate_response(user("21 degrees")) == FINAL, kind
        form = {"type": "json_object"}
        assert json.loads(llm.generate_response(user("Make a cat"), response_format=form)) == CAT


@case("dspy")
def signatures_by_json(base):
    import dspy

    lm = dspy.LM(
        f"openai/{MODEL}", api_base=f"{base}/v1", api_key="none", cache=False, max_tokens=60
    )
    assert lm("21 degrees") == [FINAL]
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        made = dspy.Predict("request -> name: str, age: int")(request="Make a cat")
    assert (made.name, made.age) == ("Tom", 3)


@case("autogen-agentchat")
def agent_and_schema(base):
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = dict.fromkeys(("function_calling", "json_output", "structured_output"), True)
    info |= {"vision": False, "family": "unknown", "multiple_system_messages": True}
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=f"{base}/v1", api_key="none", model_info=info, max_retries=0
    )

    async def run():
        agent = AssistantAgent("a", model_client=client, tools=[weather], reflect_on_tool_use=True)
        assert (await agent.run(task=ASK)).messages[-1].content == FINAL
        asked = [UserMessage(content="Make a cat", source="user")]
        said = await client.create(asked, json_output=cat_model())
        assert json.loads(said.content) == CAT
        pieces = [piece async for piece in client.create_stream(asked)]
        assert json.loads(pieces[-1].content) == CAT

    asyncio.run(run())


@case("semantic-kernel")
def agent_with_a_plugin(base):
    import openai
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Plugin:
        @kernel_function(name="weather", description="Weather now")
        def weather(self, city: str) -> str:
            return weather(city)

    api = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=api)
    agent = ChatCompletionAgent(service=service, name="A", plugins=[Plugin()])

    async def run():
        called = await agent.get_response(messages="Ask the plugin")
        assert str(called) == FINAL

    asyncio.run(run())


@case("crewai")
def model_and_crew(base):
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    for name in (f"openai/{MODEL}", f"hosted_vllm/{MODEL}"):
        llm = LLM(model=name, base_url=f"{base}/v1", api_key="none", max_tokens=100)
        assert FINAL in llm.call("21 degrees"), name
    llm = LLM(model=f"openai/{MODEL}", base_url=f"{base}/v1", api_key="none", max_tokens=100)
    agent = Agent(role="r", goal="g", backstory="b", llm=llm, tools=[tool("weather")(weather)])
    task = Task(description=ASK, expected_output="a sentence", agent=agent)
    assert FINAL in Crew(agents=[agent], tasks=[task]).kickoff().raw


@case("strands-agents")
def agent_and_schema_of_strands(base):
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(
        client_args={"base_url": f"{base}/v1", "api_key": "none"},
        model_id=MODEL,
        params={"max_tokens": 100},
    )
    agent = Agent(model=model, tools=[tool(weather)], callback_handler=None)
    assert FINAL in str(agent(ASK))


logging.disable(logging.WARNING)
