"""The package `pydantic-ai`, over all three APIs."""

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
over_chat = OpenAIChatModel(MODEL, provider=provider)
over_responses = OpenAIResponsesModel(MODEL, provider=provider)
over_messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))

for model in (over_chat, over_responses, over_messages):
    agent = Agent(model, instructions="Be kind.", tools=[weather])
    tell(
        chat=agent.run_sync(HELLO).output,
        stream=list(agent.run_stream_sync(HELLO).stream_text(delta=True, debounce_by=None)),
        tools=agent.run_sync(WEATHER).output,
        streamed_tools="".join(agent.run_stream_sync(WEATHER).stream_text(delta=True)),
        structured=Agent(model, output_type=Place).run_sync(f"{DESCRIBE} Call final_result.").output,
    )
# It asks for a form otherwise than by a call only where it knows that the model can: by names, those of Anthropic.
for model in (over_chat, over_responses):
    tell(structured=Agent(model, output_type=NativeOutput(Place)).run_sync(DESCRIBE).output)
