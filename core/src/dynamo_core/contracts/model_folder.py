"""Reading the text-related files of a Hugging Face style model folder."""

from __future__ import annotations

import errno
from pathlib import Path

from dynamo_core.errors import ConfigError
from dynamo_core.files import read_file

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"
#: The template for conversations with tools, where the folder has one beside `CHAT_TEMPLATE`.
TOOL_TEMPLATE = "tool_use.jinja"

#: Every file that is ever read from a model folder; weights are none of the framework's business.
FILE_NAMES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    GENERATION_CONFIG,
    MODEL_CONFIG,
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
    TOOL_TEMPLATE,
)

#: Where a file lies that is not in the model folder itself.
_SUBFOLDERS = {TOOL_TEMPLATE: "additional_chat_templates"}

#: The largest file that is read, in bytes.
MAX_FILE_SIZE = 256 * 1024 * 1024


def load_folder(path: str | Path) -> dict[str, bytes]:
    """Return the known files of a model folder, by bare name. Only `TOKENIZER` must be there.

    Raises:
        ConfigError: the folder or its tokenizer.json is missing, or a file cannot be read or is too large.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(
            f"model folder {folder} {what}; set model.path to a folder that holds {TOKENIZER}, "
            "or leave it out if the engine needs no model files: bytes are the tokens then"
        )
    files: dict[str, bytes] = {}
    for name in FILE_NAMES:
        data = _read(folder / _SUBFOLDERS.get(name, "") / name)
        if data is not None:
            files[name] = data
    if TOKENIZER not in files:
        raise ConfigError(
            f"model folder {folder} has no {TOKENIZER}; export the model's fast tokenizer into it "
            "(save_pretrained writes the file), or leave model.path out if the engine needs no model files: "
            "bytes are the tokens then"
        )
    return files


def load_template(path: str | Path) -> bytes:
    """Return a chat template that is not in the model's folder.

    Raises:
        ConfigError: there is no such file, or it cannot be read or is too large.
    """
    data = _read(Path(path))
    if data is None:
        raise ConfigError(f"chat template {path} does not exist; set model.custom_jinja_template to a file, or drop it")
    return data


def _read(path: Path) -> bytes | None:
    """Return the content of a file, None if there is none."""
    try:
        return read_file(path, MAX_FILE_SIZE, pipe=False).data
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        remedy = "check model.path" if error.errno == errno.EFBIG else "mend its type or permissions"
        raise ConfigError(f"cannot read {path}: {reason}; {remedy}", cause=error) from error
