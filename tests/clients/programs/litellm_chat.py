"""The package `litellm`."""

import json

import litellm
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

server = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
hello = [{"role": "user", "content": HELLO}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]


def answer_with_tools() -> str:
    messages = [{"role": "user", "content": WEATHER}]
    asked = litellm.completion(**server, messages=messages, tools=tools).choices[0].message
    messages.append(asked)
    for call in asked.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return litellm.completion(**server, messages=messages, tools=tools).choices[0].message.content


def reranked(provider: str, base: str) -> list[int]:
    documents = ["An egg.", "Rain falls from clouds.", "Rain."]
    found = litellm.rerank(
        model=f"{provider}/{MODEL}", api_base=base, api_key="none", query="Whence rain?", documents=documents, top_n=2
    )
    return [result["index"] for result in found.results]


described = litellm.completion(**server, messages=[{"role": "user", "content": DESCRIBE}], response_format=Place)
tell(
    chat=litellm.completion(**server, messages=hello).choices[0].message.content,
    stream=[
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**server, messages=hello, stream=True)
    ],
    tools=answer_with_tools(),
    structured=Place.model_validate_json(described.choices[0].message.content),
    reranked=[reranked("hosted_vllm", URL), reranked("jina_ai", f"{URL}/v1/rerank"), reranked("cohere", URL)],
)
