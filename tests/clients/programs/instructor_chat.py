"""The package `instructor`, which is about structured answers: by a call of a tool, and as JSON."""

import instructor
import openai
from shared import DESCRIBE, HELLO, MODEL, URL, Place, tell

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
by_call = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
as_json = instructor.from_openai(plain, mode=instructor.Mode.JSON)
asked = {"model": MODEL, "messages": [{"role": "user", "content": DESCRIBE}], "response_model": Place}
hello = {"model": MODEL, "messages": [{"role": "user", "content": HELLO}], "response_model": None}

tell(
    chat=by_call.create(**hello).choices[0].message.content,
    stream=[chunk.choices[0].delta.content or "" for chunk in by_call.create(**hello, stream=True)],
    structured=by_call.create(**asked),
    structured_as_json=as_json.create(**asked),
    structured_stream=list(by_call.create_partial(**asked))[-1],
)
