"""The package `openai`, over the Responses API."""

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


def answer_with_tools() -> str:
    items = [{"role": "user", "content": WEATHER}]
    with client.responses.stream(model=MODEL, input=items, tools=tools, store=False) as stream:
        asked = stream.get_final_response()
    items += asked.output
    for call in asked.output:
        if call.type == "function_call":
            result = weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return client.responses.create(model=MODEL, input=items, tools=tools, store=False).output_text


events = client.responses.create(model=MODEL, input=HELLO, stream=True)
tell(
    chat=client.responses.create(model=MODEL, instructions="Be kind.", input=HELLO).output_text,
    stream=[event.delta for event in events if event.type == "response.output_text.delta"],
    tools=answer_with_tools(),
    structured=client.responses.parse(model=MODEL, input=DESCRIBE, text_format=Place).output_parsed,
    counted=client.responses.input_tokens.count(model=MODEL, input=HELLO).input_tokens,
)
