"""The package `ollama`."""

from collections.abc import Callable
from typing import Any

import ollama
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

client = ollama.Client(host=URL)
hello = [{"role": "user", "content": HELLO}]


def whole(messages: list) -> list[Any]:
    return [client.chat(MODEL, messages, tools=[weather]).message]


def streamed(messages: list) -> list[Any]:
    return [part.message for part in client.chat(MODEL, messages, tools=[weather], stream=True)]


def answered(ask: Callable[[list], list[Any]]) -> str:
    messages: list = [{"role": "user", "content": WEATHER}]
    asked = ask(messages)
    messages += asked
    for call in [call for message in asked for call in message.tool_calls or ()]:
        result = weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    return "".join(message.content or "" for message in ask(messages))


described = client.chat(MODEL, [{"role": "user", "content": DESCRIBE}], format=Place.model_json_schema())
tell(
    chat=client.chat(MODEL, hello).message.content,
    stream=[part.message.content or "" for part in client.chat(MODEL, hello, stream=True)],
    tools=answered(whole),
    streamed_tools=answered(streamed),
    structured=Place.model_validate_json(described.message.content),
)
