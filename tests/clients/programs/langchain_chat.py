"""The package `langchain-openai`."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL)
weather_tool = tool(weather)


def answer_with_tools() -> str:
    bound = model.bind_tools([weather_tool])
    messages = [HumanMessage(WEATHER)]
    asked = bound.invoke(messages)
    messages.append(asked)
    for call in asked.tool_calls:
        messages.append(ToolMessage(weather_tool.invoke(call["args"]), tool_call_id=call["id"]))
    return bound.invoke(messages).content


tell(
    chat=model.invoke(HELLO).content,
    stream=[chunk.content for chunk in model.stream(HELLO)],
    tools=answer_with_tools(),
    structured=model.with_structured_output(Place).invoke(DESCRIBE),
)
