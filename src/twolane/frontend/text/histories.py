"""Other forms of a conversation, for a chat template that refuses it or shows only a part of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from twolane.frontend.text.template_form import Message

SYSTEM = ("system", "developer")


def other_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield other forms of a conversation: with each change that makes one alone, without and with
    fewer messages, and then with all changes, without and with the last one."""
    alone = [change(messages) for change in CHANGES]
    forms = [form for each in alone for form in (each, with_fewer_messages(each))]
    changed = [*accumulate(CHANGES, lambda whole, change: change(whole), initial=messages)]
    seen = [[*messages]]
    for form in [*forms, *map(with_fewer_messages, changed[-2:])]:
        if [*form] not in seen:
            seen.append([*form])
            yield form


def with_fewer_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with those of the system in front as one, and likewise those of the user
    or of the assistant that follow each other, where they are text alone."""
    # The first message of each run, and the texts of all; no text if it has more than that.
    runs: list[tuple[Message, list[str]]] = []
    for message in messages:
        text, (last, texts) = text_alone(message), runs[-1] if runs else ({}, [])
        roles = {message["role"], last.get("role")}
        joins = roles in SPEAKERS or (len(runs) == 1 and roles <= {*SYSTEM})
        if joins and texts and text is not None:
            texts.append(text)
        else:
            runs.append((message, [] if text is None else [text]))
    return [
        {"role": "system" if first["role"] in SYSTEM else first["role"], "content": joined(texts)}
        if len(texts) > 1
        else first
        for first, texts in runs
    ]


def with_single_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with each of several calls as a message of its own before its result.

    Llama 3's templates take one call in a message, although the models make several. A result
    without an id is that of the first call that has none yet; if there is no call of its id, the
    messages stay as they are.
    """
    turns = list[Message]()
    todo = list[Message]()
    for message in messages:
        if message["role"] != "tool":
            turns += todo
            todo = single_calls(message)
            if len(todo) < 2:
                turns, todo = [*turns, *todo], []
            continue
        id = message.get("tool_call_id")
        ids = (turn["tool_calls"][0].get("id") for turn in todo)
        found = next((place for place, each in enumerate(ids) if each == id), None)
        if todo and id is not None and found is None:
            return messages
        called = [todo.pop(found or 0)] if todo else []
        turns += [*called, message]
    return [*turns, *todo]


def single_calls(message: Message) -> list[Message]:
    """Return a message with one call each; what else it has is beside the first one."""
    first, *others = message.get("tool_calls") or [None]
    if not others:
        return [message]
    alone = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in others]
    return [{**message, "tool_calls": [first]}, *alone]


def with_text_before_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the assistant's text beside calls as a message of its own before
    them: some templates show it in place of the calls (DeepSeek-R1)."""
    turns = list[Message]()
    for message in messages:
        calls = message.get("tool_calls")
        if calls and message["content"]:
            turns.append({name: v for name, v in message.items() if name != "tool_calls"})
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        turns.append(message)
    return turns


def without_empty_answers(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without those of the assistant that say nothing (Ministral), except the
    last message, which may be continued."""
    empty = {"role": "assistant"}
    said = [m for m in messages[:-1] if {name: v for name, v in m.items() if v} != empty]
    return [*said, *messages[-1:]]


def with_late_rules_told(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with those of the system as the user's, except in front: some templates
    refuse the role there, or drop the message (Qwen 3.5, gpt-oss)."""
    front = leading(messages)
    return [
        {**message, "role": "user"} if place >= front and message["role"] in SYSTEM else message
        for place, message in enumerate(messages)
    ]


def with_the_user_told(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with those of the system in front as the beginning of the user's first
    one: some templates refuse the role (Gemma 2), show it only where the user speaks last (Mistral
    Nemo), or want a message of the user (Qwen 3.5)."""
    front = leading(messages)
    whole = front + (len(messages) > front and messages[front]["role"] == "user")
    texts = [text_alone(message) for message in messages[:whole]]
    if not front or None in texts or (whole == front < len(messages)):
        return messages
    told = joined([text for text in texts if text])
    return [{"role": "user", "content": told}, *messages[whole:]]


def with_empty_turns(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with empty ones of the user in front of an answer that begins the
    conversation, and of the assistant between a result and the user's next message: some templates
    want their turns to alternate (Mistral, Gemma 2)."""
    turns, last = list[Message](), "system"
    for message in messages:
        role = message["role"]
        if last in SYSTEM and role == "assistant":
            turns.append({"role": "user", "content": ""})
        if (last, role) == ("tool", "user"):
            turns.append({"role": "assistant", "content": ""})
        turns.append(message)
        last = role
    return turns


def with_all_keys(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return tools with an empty description and no parameters where they have none: some templates
    read these keys of every tool (gpt-oss, Seed-OSS)."""
    functions = [tool["function"] for tool in tools]
    return [
        {
            "type": "function",
            "function": {
                "name": function["name"],
                "description": function.get("description", ""),
                "parameters": {"type": "object", "properties": {}, **function["parameters"]},
            },
        }
        for function in functions
    ]


def leading(messages: Sequence[Message]) -> int:
    """Return the number of messages of the system in front."""
    others = (place for place, m in enumerate(messages) if m["role"] not in SYSTEM)
    return next(others, len(messages))


def joined(texts: Sequence[str]) -> str:
    """Return texts of several messages as one."""
    return "\n\n".join(texts)


def text_alone(message: Message) -> str | None:
    """Return the text of a message that has nothing else; None: it has."""
    content: Any = message["content"]
    texts = [content] if isinstance(content, str) else content or ()
    if message.keys() > {"role", "content"} or not all(isinstance(each, str) for each in texts):
        return None
    return "\n".join(texts)


SPEAKERS = ({"user"}, {"assistant"})
"""Roles of messages that may be joined."""
CHANGES: Sequence[Callable[[Sequence[Message]], Sequence[Message]]] = (
    with_fewer_messages,
    with_single_calls,
    without_empty_answers,
    with_late_rules_told,
    with_empty_turns,
    with_the_user_told,
    with_text_before_calls,
)
"""Ways in which a conversation changes. The last one is not needed where a template shows calls
and the text beside them, and may then break the order of turns."""
