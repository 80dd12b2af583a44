"""The package `openai-agents` on a server that remembers: by the id of the last response, and by a conversation."""

import asyncio

import openai
from agents import Agent, OpenAIConversationsSession, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as without_tracing
from shared import HELLO, MODEL, URL, WEATHER, tell, weather

without_tracing(True)


async def answers() -> None:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    agent = Agent("helper", model=OpenAIResponsesModel(MODEL, client), tools=[function_tool(weather)])
    first = await Runner.run(agent, WEATHER, auto_previous_response_id=True)
    second = await Runner.run(agent, HELLO, previous_response_id=first.last_response_id)
    items = [item async for item in client.responses.input_items.list(second.last_response_id or "")]
    session = OpenAIConversationsSession(openai_client=client)
    third = await Runner.run(agent, WEATHER, session=session)
    kept = await session.get_items()
    assert len(items) == len(kept) + 1 == 5, (items, kept)
    tell(tools=first.final_output, resumed=second.final_output, streamed_tools=third.final_output)


asyncio.run(answers())
