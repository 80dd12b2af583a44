"""The package `anthropic`, with its tool runner."""

import anthropic
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

client = anthropic.Anthropic(base_url=URL, api_key="none")
hello = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": HELLO}]}


def answer_with_tools(*, stream: bool) -> str:
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[anthropic.beta_tool(weather)],
        stream=stream,
    )
    return runner.until_done().content[0].text


with client.messages.stream(**hello) as pieces:
    streamed = list(pieces.text_stream)
described = client.messages.parse(
    model=MODEL, max_tokens=200, messages=[{"role": "user", "content": DESCRIBE}], output_format=Place
)
tell(
    chat=client.messages.create(**hello, system="Be kind.").content[0].text,
    stream=streamed,
    tools=answer_with_tools(stream=False),
    streamed_tools=answer_with_tools(stream=True),
    structured=described.parsed_output,
    counted=client.messages.count_tokens(model=MODEL, messages=hello["messages"]).input_tokens,
)
