"""The package `llm`: a model of its own file of models, as its users add one."""

from pathlib import Path

import llm
from shared import DESCRIBE, HELLO, MODEL, URL, WEATHER, Place, tell, weather

models = Path(llm.user_dir()) / "extra-openai-models.yaml"
models.write_text(
    f"- {{model_id: ours, model_name: {MODEL}, api_base: '{URL}/v1', supports_tools: true, supports_schema: true}}\n"
)
model = llm.get_model("ours")

tell(
    chat=model.prompt(HELLO, stream=False, key="none").text(),
    stream=list(model.prompt(HELLO, key="none")),
    tools=model.chain(WEATHER, tools=[weather], key="none").text(),
    structured=Place.model_validate_json(model.prompt(DESCRIBE, schema=Place, key="none").text()),
)
