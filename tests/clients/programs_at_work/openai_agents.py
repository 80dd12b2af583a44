"""The package `openai-agents` with tools and an `output_type`, over the Responses API, which is its own choice."""

import asyncio

import openai
from acts import ASKED, BOTH, GO_ON, MODEL, TOOLS, URL, Said, tell
from agents import Agent, OpenAIResponsesModel, Runner, RunResultStreaming, function_tool
from agents import set_tracing_disabled as without_tracing

without_tracing(True)
tools = [function_tool(tool) for tool in TOOLS]


async def ended(name: str, asked: object) -> RunResultStreaming:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    model = OpenAIResponsesModel(name, client)
    agent = Agent("worker", instructions="Be exact.", model=model, tools=tools, output_type=Said)
    result = Runner.run_streamed(agent, asked)
    async for _ in result.stream_events():
        pass
    return result


async def main() -> None:
    first = await ended(MODEL, ASKED)
    tell(task=first.final_output)
    again = await ended(MODEL, [*first.to_input_list(), {"role": "user", "content": GO_ON}])
    tell(resumed=again.final_output)
    tell(both=(await ended(f"{MODEL}-both", BOTH)).final_output)


asyncio.run(main())
