"""aider, which calls no tools: it asks for files, edits them by blocks of text, and runs a command after each edit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agents.formats import FORMATS, Format
from tests.agents.models import config, model_name, text_of
from tests.agents.task import ASKED, BOTH, BOTH_DONE, COLOUR, DONE, GO_ON, GONE_ON, REASONING, prepare, said
from tests.clients.coding_agents import printed
from tests.clients.programs_of import command

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SPOKEN = [FORMATS[name] for name in ("hermes", "deepseek_v31", "glm45", "gpt_oss", "minimax_m2", "mistral")]


def block(name: str, old: str, new: str) -> str:
    """Return an edit in the words of aider."""
    return f"{name}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}\n>>>>>>> REPLACE\n```\n"


def script(form: Format) -> list[dict[str, Any]]:
    """Return what a model answers; what it has said before is in its prompt."""
    both = [block(f"{name}.txt", "", name) for name in ("one", "two")]
    says = [
        (GO_ON, GONE_ON + "\n\n" + block("colour.txt", f"{COLOUR}\n", "blue")),
        (BOTH, "".join([f"{BOTH_DONE}\n\n", *both])),
        # The file is in the prompt once it was asked for.
        ("```\nred", DONE + "\n\n" + block("colour.txt", "red\n", COLOUR)),
        (ASKED, "I need to see `colour.txt`."),
        (None, "A change of the colour."),
    ]
    return [{"match": match, "text": text_of(form.write(REASONING, text, []))} for match, text in says]


@pytest.fixture(scope="module")
def server(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serve_for_module(
        config([(model_name(form), form, script(form)) for form in SPOKEN], tmp_path_factory.mktemp("models"))
    )


def environment(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder / "home"), "PATH": os.environ["PATH"]}


def prepared(folder: Path) -> Path:
    """Return a repository with the files of the task: aider offers only files that are in one."""
    (folder / "home").mkdir()
    (folder / "home" / ".gitconfig").write_text("[user]\nname = tests\nemail = tests@example.invalid\n")
    prepare(folder / "work")
    for words in (["init"], ["add", "."], ["commit", "--message", "The task"]):
        subprocess.run(
            ["git", *words], cwd=folder / "work", env=environment(folder), check=True, capture_output=True, timeout=20
        )
    return folder / "work"


def asked(url: str, form: Format, folder: Path, prompt: str, *options: str) -> str:
    """Return what aider prints."""
    words = [
        *("--model", f"openai/{model_name(form)}", "--edit-format", "diff", "--message", prompt, "--yes-always"),
        *("--auto-test", "--test-cmd", "sh run.sh", "--map-tokens", "0", "--no-pretty", "--no-show-model-warnings"),
        *("--no-check-update", "--analytics-disable", "--no-suggest-shell-commands", "--no-detect-urls", *options),
    ]
    variables = {
        **environment(folder),
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        # It would ask a server of its makers for the prices of models.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }
    return printed([command("aider", "aider"), *words], variables, folder / "work")


@pytest.mark.parametrize("form", SPOKEN, ids=str)
def test_aider_asks_for_a_file_edits_it_tests_it_and_goes_on(
    form: Format, server: Any, tmp_path: Path, recorded: Any
) -> None:
    work = prepared(tmp_path)
    recorder = recorded("aider-task", server)

    printed = asked(recorder.url, form, tmp_path, ASKED)

    assert DONE in printed, printed
    assert said(work) == COLOUR
    assert recorder.statuses == {200}

    recorder = recorded("aider-resumed", server)

    printed = asked(recorder.url, form, tmp_path, GO_ON, "--restore-chat-history", "colour.txt")

    assert GONE_ON in printed
    assert said(work) == "blue"
    assert recorder.statuses == {200}

    recorder = recorded("aider-parallel", server)

    printed = asked(recorder.url, form, tmp_path, BOTH)

    assert BOTH_DONE in printed
    assert [(work / f"{name}.txt").read_text() for name in ("one", "two")] == ["one\n", "two\n"]
    assert recorder.statuses == {200}
