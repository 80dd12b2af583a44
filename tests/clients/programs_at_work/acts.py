"""What all programs ask and can do, and how they print what they got."""

import json
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

URL, MODEL, ASKED, GO_ON, BOTH = sys.argv[1:]


class Said(BaseModel):
    """The last answer of a program that asks for a form."""

    said: str


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: The file.
    """
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: The file.
        old: What is there.
        new: What is to be there.
    """
    text = Path(path).read_text()
    if old not in text:
        return "the text is not in the file"
    Path(path).write_text(text.replace(old, new))
    return "replaced"


def run_command(command: str) -> str:
    """Run a command of the shell.

    Args:
        command: The command.
    """
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20, check=False)
    return ended.stdout or "no output"


TOOLS = (read_file, edit_file, run_command)


def tell(**found: object) -> None:
    """Print results, which the test reads."""
    print(json.dumps(found, default=lambda value: value.said))
