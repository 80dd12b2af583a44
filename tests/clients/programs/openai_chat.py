"""The package `openai`, over chat completions."""

import json
from collections.abc import Callable
from typing import Any

import openai
from shared import DESCRIBE, HELLO, MEASURE, MODEL, URL, WEATHER, Place, tell, weather

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
hello = [{"role": "user", "content": HELLO}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]


def whole(messages: list) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message


def streamed(messages: list) -> Any:
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        return stream.get_final_completion().choices[0].message


def parsed(messages: list) -> Any:
    function = {"name": "weather", "parameters": {**schema, "additionalProperties": False}, "strict": True}
    strict = [{"type": "function", "function": function}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, tools=strict, response_format=Place)
    return answer.choices[0].message


def answered(ask: Callable[[list], Any], content: str = WEATHER) -> Any:
    messages = [{"role": "user", "content": content}]
    messages.append(ask(messages))
    for call in messages[-1].tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ask(messages)


chunks = client.chat.completions.create(
    model=MODEL, messages=hello, stream=True, stream_options={"include_usage": True}
)
described = client.chat.completions.parse(
    model=MODEL, messages=[{"role": "user", "content": DESCRIBE}], response_format=Place
)
tell(
    chat=client.chat.completions.create(model=MODEL, messages=hello).choices[0].message.content,
    stream=[chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
    tools=answered(whole).content,
    streamed_tools=answered(streamed).content,
    structured=described.choices[0].message.parsed,
    structured_after_call=answered(parsed, MEASURE).parsed,
)
