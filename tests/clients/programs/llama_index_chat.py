"""The packages `llama-index-core` and `llama-index-llms-openai-like`."""

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

model = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True
)
hello = [ChatMessage(HELLO)]


def answer_with_tools() -> str:
    tools = [FunctionTool.from_defaults(weather)]
    messages = [ChatMessage(WEATHER)]
    asked = model.chat_with_tools(tools, chat_history=messages)
    messages.append(asked.message)
    for call in model.get_tool_calls_from_response(asked):
        result = str(tools[0](**call.tool_kwargs))
        messages.append(ChatMessage(result, role="tool", additional_kwargs={"tool_call_id": call.tool_id}))
    return model.chat_with_tools(tools, chat_history=messages).message.content


tell(
    chat=model.chat(hello).message.content,
    stream=[chunk.delta for chunk in model.stream_chat(hello)],
    tools=answer_with_tools(),
    structured=model.as_structured_llm(Place).chat([ChatMessage(f"{DESCRIBE} Call Place.")]).raw,
)
