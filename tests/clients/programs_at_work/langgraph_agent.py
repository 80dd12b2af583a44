"""The package `langgraph`: its agent, streaming, with a memory of the conversation."""

from acts import ASKED, BOTH, GO_ON, MODEL, TOOLS, URL, tell
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent

memory = InMemorySaver()


def ended(name: str, asked: str, thread: str) -> str:
    model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=name, streaming=True)
    graph = create_react_agent(model, list(TOOLS), checkpointer=memory)
    config = {"configurable": {"thread_id": thread}}
    for _ in graph.stream({"messages": [("user", asked)]}, config, stream_mode="messages"):
        pass
    return graph.get_state(config).values["messages"][-1].content


tell(task=ended(MODEL, ASKED, "one"))
tell(resumed=ended(MODEL, GO_ON, "one"))
tell(both=ended(f"{MODEL}-both", BOTH, "two"))
