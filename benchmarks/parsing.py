"""What an answer with thoughts, calls and text costs with parsers and without: the model's files and its words."""

import json
from pathlib import Path
from typing import Any, Final

#: The parsers that can be measured, each with a call as its models write it, and the tokens of its markup.
CALLS: Final = {
    "hermes": (
        '<tool_call>\n{"name": "edit", "arguments": {"path": "src/main.py", "text": "for line in lines:\\n    print()"'
        ', "lines": [1, 20, 300], "keep": true}}\n</tool_call>',
        ("<tool_call>", "</tool_call>"),
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{"path": "src/main.py", "text": "for line"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
}
#: The tools of every request.
TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "type": "function",
        "function": {"name": "edit", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    },
)
_THOUGHTS: Final = "<think>The file is to be read first, and then two lines that are wrong are to be mended.</think>\n"
_WORDS: Final = "Here is what I have found in the file, line by line, and what I am going to do about it. "


def engine(parser: str) -> str:
    """Return the keys of a mocker that answers so, as fast as it can: more words than any request asks for."""
    call, _ = CALLS[parser]
    text = _THOUGHTS + _WORDS + (call + "\n" + _WORDS) * 20
    return f"speedup_ratio: 0, output: script, script: [{{text: {json.dumps(text, ensure_ascii=False)}}}]"


def add_markers(folder: Path, parser: str) -> None:
    """Give the tokenizer of a folder the markup as special tokens, as the models of the format have it."""
    from tokenizers import Tokenizer

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<think>", "</think>", *CALLS[parser][1]])
    tokenizer.save(path)
