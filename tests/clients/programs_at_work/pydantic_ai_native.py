"""The package `pydantic-ai` with tools and `NativeOutput`, streaming, over chat completions."""

import asyncio

from acts import ASKED, BOTH, GO_ON, MODEL, TOOLS, URL, Said, tell
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


async def listens(context: object, events: object) -> None:
    async for _ in events:
        pass


def agent(name: str) -> Agent:
    model = OpenAIChatModel(name, provider=provider)
    return Agent(model, instructions="Be exact.", tools=TOOLS, output_type=NativeOutput(Said))


async def main() -> None:
    first = await agent(MODEL).run(ASKED, event_stream_handler=listens)
    tell(task=first.output)
    again = await agent(MODEL).run(GO_ON, message_history=first.all_messages(), event_stream_handler=listens)
    tell(resumed=again.output)
    tell(both=(await agent(f"{MODEL}-both").run(BOTH, event_stream_handler=listens)).output)


asyncio.run(main())
