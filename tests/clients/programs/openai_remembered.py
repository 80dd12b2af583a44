"""The package `openai`, over the Responses API of a server that remembers: the client sends only what is new."""

import json

import openai
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
tools = [{"type": "function", "name": "weather", "parameters": schema, "strict": True}]


def results(answer: openai.types.responses.Response) -> list[dict[str, str]]:
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": weather(**json.loads(call.arguments))}
        for call in answer.output
        if call.type == "function_call"
    ]


def after_a_response() -> str:
    first = client.responses.create(model=MODEL, input=WEATHER, tools=tools)
    second = client.responses.create(model=MODEL, input=results(first), tools=tools, previous_response_id=first.id)
    return client.responses.retrieve(second.id).output_text


def in_a_conversation() -> str:
    talk = client.conversations.create()
    with client.responses.stream(model=MODEL, input=WEATHER, tools=tools, conversation=talk.id) as stream:
        first = stream.get_final_response()
    second = client.responses.create(model=MODEL, input=results(first), tools=tools, conversation=talk.id)
    kinds = [item.type for item in client.conversations.items.list(talk.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"], kinds
    client.conversations.delete(talk.id)
    return second.output_text


events = client.responses.create(model=MODEL, input=HELLO, stream=True)
tell(
    chat=client.responses.create(model=MODEL, input=HELLO).output_text,
    stream=[event.delta for event in events if event.type == "response.output_text.delta"],
    tools=after_a_response(),
    streamed_tools=in_a_conversation(),
    structured=client.responses.parse(model=MODEL, input=DESCRIBE, text_format=Place).output_parsed,
)
