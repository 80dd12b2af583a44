"""The package `openai-agents`, over the Responses API, which is its own choice, and over chat completions."""

import asyncio

import openai
from agents import Agent, Model, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as without_tracing
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

without_tracing(True)


async def streamed(agent: Agent) -> list[str]:
    return [
        event.data.delta
        async for event in Runner.run_streamed(agent, HELLO).stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


async def answers(model: Model) -> None:
    helper = Agent("helper", instructions="Be kind.", model=model, tools=[function_tool(weather)])
    describer = Agent("describer", model=model, output_type=Place)
    tell(
        chat=(await Runner.run(helper, HELLO)).final_output,
        stream=await streamed(helper),
        tools=(await Runner.run(helper, WEATHER)).final_output,
        structured=(await Runner.run(describer, DESCRIBE)).final_output,
    )


async def both() -> None:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    await answers(OpenAIResponsesModel(MODEL, client))
    await answers(OpenAIChatCompletionsModel(MODEL, client))


asyncio.run(both())
