"""``dynamo new``: writes a plugin package to start from."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

import click
from importlib_metadata import version

from dynamo_core.errors import ConfigError

#: Every file of the templates ends with it, so that no tool takes them for code.
SUFFIX = ".tmpl"

#: What `_NAME` asks for, in words.
ALLOWED = "begins with a small letter and holds small letters and digits, with single dashes between"

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def template_variables(kind: str, name: str, bin_folder: str = "") -> dict[str, str]:
    """What stands for what in the templates, in file names too.

    `bin_folder` is where the README finds `python` and `dynamo`; without it, beside the running interpreter.

    Raises:
        ConfigError: `name` cannot be the name of a plugin.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a plugin: it {ALLOWED}, such as my-engine")
    distribution = f"dynamo-plugin-{kind}-{name}"
    major, minor = version("dynamo-core").split(".")[:2]
    return {
        "@name@": name,
        "@distribution@": distribution,
        "@module@": distribution.replace("-", "_"),
        "@class@": "".join(part.capitalize() for part in name.split("-")),
        "@worker@": name.replace("-", "_"),
        "@core@": f"{major}.{minor}.0",
        "@bin@": shlex.quote(bin_folder or str(Path(sys.executable).parent)),
    }


def render(kind: str, name: str, bin_folder: str = "") -> dict[PurePosixPath, str]:
    """The files of a new plugin of this kind: their paths inside the package's folder, and what is in them."""
    variables = template_variables(kind, name, bin_folder)
    rendered = {}
    for path, template in _templates(files("dynamo_core.cli") / "_template" / kind, PurePosixPath()):
        rendered[PurePosixPath(_substitute(str(path), variables).removesuffix(SUFFIX))] = _substitute(
            template, variables
        )
    return rendered


def _templates(folder: Traversable, above: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from _templates(item, above / item.name)
        elif item.name.endswith(SUFFIX):
            yield above / item.name, item.read_text("utf-8")


def _substitute(text: str, variables: dict[str, str]) -> str:
    for word, value in variables.items():
        text = text.replace(word, value)
    return text


def write_all(target: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Writes the files below a folder that is not there yet; if it cannot write one, nothing of them is left.

    Raises:
        OSError: they cannot be written.
    """
    made = next(folder for folder in (*reversed(target.parents), target) if not folder.exists())
    try:
        for relative, text in files.items():
            file = target / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


@click.group()
def command() -> None:
    """Write a new plugin package to start from."""


def reject_installed(kind: str, name: str) -> None:
    """Refuses a name that a plugin has which is installed: two of one name could not be told apart.

    Raises:
        ConfigError: there is one.
    """
    from dynamo_core.plugins.metadata import find_plugins

    for entry in find_plugins():
        if (entry.kind, entry.name) == (kind, name):
            raise ConfigError(
                f"there is an {kind} {name!r} already ({entry.origin}): choose another name, or uninstall that one"
            )


@command.command(
    "engine",
    help=f"""Write an engine plugin that installs, serves, and passes its own tests.

NAME is what `use:` will say in config files. It {ALLOWED}, such as my-engine, and is not that of an engine that is
installed.
""",
)
@click.argument("name")
@click.option(
    "--path",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    show_default="the current folder",
    help="The folder in which to make the package's own folder.",
)
def engine(name: str, path: Path) -> None:
    """Writes the package and says what to do next."""
    variables = template_variables("engine", name)
    reject_installed("engine", name)
    target = path / variables["@distribution@"]
    if target.exists():
        raise ConfigError(f"{target} is there already: remove it, or choose another name or --path")
    try:
        write_all(target, render("engine", name))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}", cause=error) from error
    click.echo(f"Wrote {target}. Next:")
    # In full, so that the lines work in a shell in which no environment is active.
    programs = variables["@bin@"]
    click.echo(f"  {programs}/python -m pip install -e {shlex.quote(f'{target}[test]')}")
    click.echo(f"  {programs}/dynamo serve {shlex.quote(str(target / f'{name}.yaml'))}")
    click.echo(f"  {programs}/python -m pytest {shlex.quote(str(target))}")
