"""Other forms of a conversation, for a chat template that refuses it or shows only a part of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from twolane.frontend.text.template_form import Message

SYSTEM = ("system", "developer")


def other_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield other forms of a conversation: with each change that makes one alone, then with all."""
    whole = messages
    seen = [[*messages]]
    for change in CHANGES:
        changed, whole = change(messages), change(whole)
        if [*changed] not in seen:
            seen.append([*changed])
            yield changed
    if [*whole] not in seen:
        yield whole


def with_fewer_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with those of the system in front as one, and likewise those of the user
    that follow each other, where they are text alone."""
    # The first message of each run, and the texts of all; no text if it has more than that.
    runs: list[tuple[Message, list[str]]] = []
    for message in messages:
        text, (last, texts) = text_alone(message), runs[-1] if runs else ({}, [])
        roles = {message["role"], last.get("role")}
        joins = roles == {"user"} or (len(runs) == 1 and roles <= {*SYSTEM})
        if joins and texts and text is not None:
            texts.append(text)
        else:
            runs.append((message, [] if text is None else [text]))
    return [
        {"role": "user" if first["role"] == "user" else "system", "content": "\n\n".join(texts)}
        if len(texts) > 1
        else first
        for first, texts in runs
    ]


def with_single_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with each of several calls as a message of its own before its result.

    Llama 3's templates take one call in a message, although the models make several.
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
        called = next((turn for turn in todo if turn["tool_calls"][0].get("id") == id), None)
        if called is not None:
            todo.remove(called)
            turns.append(called)
        turns.append(message)
    return [*turns, *todo]


def single_calls(message: Message) -> list[Message]:
    """Return a message with one call each; what else it has is beside the first one."""
    first, *others = message.get("tool_calls") or [None]
    if not others:
        return [message]
    alone = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in others]
    return [{**message, "tool_calls": [first]}, *alone]


def with_calls_alone(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without the assistant's text beside calls: some templates show it in
    place of them (DeepSeek-R1)."""
    return [
        {**message, "content": None} if message.get("tool_calls") else message
        for message in messages
    ]


def with_the_user_told(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with those of the system in front as the beginning of the user's first
    one: some templates refuse the role (Gemma 2), or show it only where the user speaks last
    (Mistral)."""
    count = next((n for n, m in enumerate(messages) if m["role"] not in SYSTEM), 0)
    if not count or messages[count]["role"] != "user":
        return messages
    texts = [text_alone(message) for message in messages[: count + 1]]
    if None in texts:
        return messages
    told = "\n\n".join(text for text in texts if text)
    return [{"role": "user", "content": told}, *messages[count + 1 :]]


def text_alone(message: Message) -> str | None:
    """Return the text of a message that has nothing else; None: it has."""
    content: Any = message["content"]
    texts = [content] if isinstance(content, str) else content or ()
    if message.keys() > {"role", "content"} or not all(isinstance(each, str) for each in texts):
        return None
    return "\n".join(texts)


CHANGES: Sequence[Callable[[Sequence[Message]], Sequence[Message]]] = (
    with_fewer_messages,
    with_single_calls,
    with_calls_alone,
    with_the_user_told,
)
"""Ways in which a conversation changes, the least harm first."""
