"""Prompts equal those of the transformers library, for templates in the construction of each family of models.

`make test` compares with what `record.py` has recorded; `make test-transformers` compares the records with the library.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from click.testing import CliRunner
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import ModelCard
from dynamo_generation.endpoints.conversation import ChatDependencies
from dynamo_generation.templates.template import TemplateStore
from dynamo_plugin_frontend_openai.chat import ParsedChatCompletion
from dynamo_runtime.cli.main import cli
from dynamo_text import load_tokenizer

from tests.templates.conversations import CONVERSATIONS, Conversation
from tests.templates.record import RECORDED, recorded
from tests.templates.reference import BOS, EOS, FAMILIES, FOLDER, Family, digest

DIGESTS: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())

needs_library = pytest.mark.skipif(find_spec("transformers") is None, reason="`make test-transformers` has the library")


class Model:
    """A model of a family."""

    name = "m"
    tokenizer = load_tokenizer("bytes", {})

    def __init__(self, family: Family) -> None:
        self.card = ModelCard(name="m", instance_id=1, checksum=family.name)
        self._files = {
            "chat_template.jinja": family.template.encode(),
            "tokenizer_config.json": json.dumps({"bos_token": BOS, "eos_token": EOS}).encode(),
        }

    def file(self, name: str) -> bytes | None:
        return self._files.get(name)


def body(conversation: Conversation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": "m",
        "messages": list(conversation.messages),
        "chat_template_kwargs": conversation.variables,
        "add_generation_prompt": conversation.generates and not conversation.goes_on,
        "continue_final_message": conversation.goes_on,
    }
    return made if conversation.tools is None else {**made, "tools": list(conversation.tools)}


@pytest.fixture
async def chats() -> Any:
    store = TemplateStore(5.0)
    yield ChatDependencies(store, hide_tools=True, count_calls=lambda model, calls: None)
    await store.aclose()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_each_conversation_has_the_prompt_of_the_library(family: Family, chats: ChatDependencies) -> None:
    model: Any = Model(family)
    made: dict[str, str | None] = {}

    for title, conversation in CONVERSATIONS.items():
        try:
            made[title] = (await ParsedChatCompletion(body(conversation), chats).conversation(model)).text
        except InvalidArgument:
            made[title] = None

    wrong = {title: text for title, text in made.items() if digest(text) != DIGESTS[family.name][title]}
    assert wrong == {}


def test_the_check_shows_the_forms_that_a_template_reads() -> None:
    template = FOLDER / "deepseek_v31.jinja"
    options = ["check", "--json", "--set", f"workers.mock.model.custom_jinja_template={template}"]

    shown = json.loads(CliRunner().invoke(cli, options, prog_name="dynamo").output)["templates"]

    forms = {row["messages"]: row["form"] for row in shown}
    assert forms["arguments of calls"] == "text"
    assert forms["content of calls"] == "null"
    assert "developer messages become system messages" in forms["changed"]


@needs_library
@pytest.mark.full
def test_the_recorded_prompts_equal_the_librarys() -> None:
    assert recorded() == DIGESTS
