"""``dynamo new``: writes a new plugin to start from, as a package or as one file."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

import click
from dynamo_core.errors import ConfigError
from importlib_metadata import version

from dynamo_runtime.cli.lazy import KindGroup

#: Every file of the templates ends with it, so that no tool takes them for code.
SUFFIX = ".tmpl"

#: What `_NAME` asks for, in words.
ALLOWED = "begins with a small letter and holds small letters and digits, with single dashes between"

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
#: Divides the parts of a README that differ from kind to kind.
_PART = "---\n"
_USUAL = """`dynamo serve` also needs a plugin for each other stage; the usual ones are @usual@. Then, from another
terminal, ask it something; Ctrl-C stops the server:

```sh
curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
  -d '{"model": "mock-model", "prompt": "Hello", "max_tokens": 16}'
```"""
_RUN = """# `python -m @module@`, without a config file that names it.
run = ["dynamo-runtime~=@core@"]
"""
#: The plugins beside which a new one runs.
_STAGES = {
    "frontend": "openai",
    "router": "round-robin",
    "transport": "inproc",
    "discovery": "memory",
    "engine": "mocker",
}


@dataclass(frozen=True, slots=True)
class Template:
    """The parameters of a kind's template: how the plugin is picked, and the settings that an example sets."""

    kind: str
    example: str = ""
    picks: str = "use: @name@"
    #: Words of a request, which the kit of a frontend needs.
    request: str = ""
    #: What the class's name ends with, and the name of its module; the kind's last word.
    word: str = ""
    dependencies: tuple[str, ...] = ()
    #: Extras of its distribution, as lines of the manifest.
    extras: str = ""

    @property
    def last_word(self) -> str:
        """The kind in one word."""
        return self.word or self.kind

    @property
    def phrase(self) -> str:
        """The kind in messages and pages."""
        return self.kind.replace("_", " ")


TEMPLATES = {
    template.kind: template
    for template in (
        Template("engine", "delay=0.01", extras=_RUN),
        Template("router", "token_weight=0.01"),
        Template("admission", "limit=8"),
        Template("transport"),
        Template("discovery"),
        Template(
            "frontend",
            "max_tokens=8",
            request='POST /generate {"model": "MODEL", "prompt": "PROMPT"}',
            dependencies=("dynamo-http~=@core@", "dynamo-text~=@core@", "aiohttp>=3.14"),
        ),
        Template("response_store", "max_records=8", word="store"),
        Template("extension", "kept=8", dependencies=("aiohttp>=3.14",)),
        Template("tool_parser", picks="tool_call_parser: @name@", word="parser"),
        Template("reasoning_parser", picks="reasoning_parser: @name@", word="parser"),
    )
}


def template_variables(kind: str, name: str, bin_folder: str = "", *, single_file: bool = False) -> dict[str, str]:
    """Return what stands for what in the templates, in file names too. A value may hold words that come after it.

    `bin_folder` is where the README finds `python` and `dynamo`; without it, beside the running interpreter.

    Raises:
        ConfigError: `name` cannot be the name of a plugin.
    """
    from dynamo_core.contracts.plugin import DYNAMO_API
    from dynamo_core.plugins.loader import CONTRACTS

    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a plugin: it {ALLOWED}, such as my-{_dashed(kind)}")
    template, contract = TEMPLATES[kind], CONTRACTS[kind]
    about = (files("dynamo_runtime.cli") / "_template" / kind / f"about.md{SUFFIX}").read_text("utf-8")
    intro, serve, settings = (part.strip() for part in about.split(_PART, 2))
    distribution = f"dynamo-plugin-{_dashed(kind)}-{name}"
    module = distribution.replace("-", "_")
    file = name.replace("-", "_") if single_file else template.last_word
    class_name = "".join(part.capitalize() for part in name.split("-")) + template.last_word.capitalize()
    dependencies = ["dynamo-core~=@core@", *template.dependencies]
    others = [f"`dynamo-plugin-{other}-{plugin}`" for other, plugin in _STAGES.items() if other != kind]
    major, minor = version("dynamo-core").split(".")[:2]
    return {
        "@intro@": intro,
        "@serve@": serve.replace("@usual@", _USUAL).replace("@usual@", f"{', '.join(others[:-1])} and {others[-1]}"),
        "@settings@": settings,
        "@set@": f" --set {template.example}" if template.example else "",
        "@request@": f" \\\n  {request_option(kind)}" if template.request else "",
        "@choice@": ", with the\nsettings of your choice" if template.example else "",
        "@command@": " ".join([*command_words(kind)[:1], name, *command_words(kind)[1:]]),
        "@dependencies@": ", ".join(f'"{one}"' for one in dependencies),
        "@extras@": template.extras,
        "@declare@": f"\nDYNAMO_API = {DYNAMO_API}\n" if single_file else "",
        "@picks@": template.picks,
        "@use@": f"./{file}.py:{class_name}" if single_file else name,
        "@entry@": f"{kind}-{name}",
        "@from@": file if single_file else f"{module}.{file}",
        "@file@": file,
        "@plugin@": class_name,
        "@base@": contract.class_name,
        "@hook@": contract.hook,
        "@api@": str(DYNAMO_API),
        "@kind@": template.phrase,
        "@word@": template.last_word,
        "@name@": name,
        "@distribution@": distribution,
        "@module@": module,
        "@class@": class_name.removesuffix(template.last_word.capitalize()),
        "@worker@": name.replace("-", "_"),
        "@core@": f"{major}.{minor}.0",
        "@bin@": shlex.quote(bin_folder or str(Path(sys.executable).parent)),
    }


def _dashed(kind: str) -> str:
    return kind.replace("_", "-")


def command_words(kind: str) -> list[str]:
    """Return how a kind is spelt on the command line: both kinds of parsers are `parser`, one with an option."""
    return {"tool_parser": ["parser"], "reasoning_parser": ["parser", "--reasoning"]}.get(kind, [kind])


def request_option(kind: str) -> str:
    """Return the option with which the kit of a kind is given a request; empty if it needs none."""
    request = TEMPLATES[kind].request
    return f"--request {shlex.quote(request)}" if request else ""


#: Where the files of a kind's template go.
_IN_PACKAGE = {
    "plugin.py": "src/@module@/@file@.py",
    "main.py": "src/@module@/__main__.py",
    "test.py": "tests/test_@module@.py",
    "config.yaml": "@name@.yaml",
}
_AS_ONE_FILE = {"plugin.py": "@file@.py", "test.py": "test_@file@.py", "config.yaml": "@name@.yaml"}


def render(kind: str, name: str, bin_folder: str = "", *, single_file: bool = False) -> dict[PurePosixPath, str]:
    """Return the files of a new plugin of this kind: their paths inside its folder, and what is in them."""
    variables = template_variables(kind, name, bin_folder, single_file=single_file)
    templates = files("dynamo_runtime.cli") / "_template"
    places = _AS_ONE_FILE if single_file else _IN_PACKAGE
    found = dict(_templates(templates / ("single" if single_file else "package"), PurePosixPath()))
    for path, text in _templates(templates / kind, PurePosixPath()):
        place = places.get(str(path).removesuffix(SUFFIX))
        if place is not None:
            found[PurePosixPath(place)] = text
    return {
        PurePosixPath(_substitute(str(path), variables).removesuffix(SUFFIX)): _substitute(text, variables)
        for path, text in found.items()
    }


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
    """Write the files below a folder that is not there yet; if it cannot write one, nothing of them is left.

    Raises:
        OSError: they cannot be written.
    """
    made = next(folder for folder in (*reversed(target.parents), target) if not folder.exists())
    try:
        for relative, text in files.items():
            file = target / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
            # Whatever the umask is: a plugin of one file is loaded only if its owner alone may write to it.
            file.chmod(0o644)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


@click.group(cls=KindGroup, part="scaffold")
def command() -> None:
    """Write a new plugin to start from: a package that installs, or one file beside a config file.

    It runs, and passes its own tests and the kit of its kind. Kinds that connect other processes, or speak to clients,
    begin with something small in the place of the connection or the API.
    """


def reject_installed(kind: str, name: str) -> None:
    """Refuse a name that a plugin has which is installed: two of one name could not be told apart.

    Raises:
        ConfigError: there is one.
    """
    from dynamo_core.plugins.metadata import find_plugins

    for entry in find_plugins():
        if (entry.kind, entry.name) == (kind, name):
            phrase = TEMPLATES[kind].phrase
            article = "an" if phrase[0] in "aeiou" else "a"
            raise ConfigError(
                f"there is {article} {phrase} {name!r} already ({entry.origin}): choose another name, or uninstall "
                "that one"
            )


def write_plugin(kind: str, name: str, path: Path, *, single_file: bool) -> None:
    """Write a plugin, and say what to do next.

    Raises:
        ConfigError: the name is taken or cannot be one, or the files cannot be written.
    """
    variables = template_variables(kind, name, single_file=single_file)
    if not single_file:
        reject_installed(kind, name)
    target = path / (name if single_file else variables["@distribution@"])
    if target.exists():
        raise ConfigError(f"{target} is there already: remove it, or choose another name or --path")
    try:
        write_all(target, render(kind, name, single_file=single_file))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}", cause=error) from error
    click.echo(f"Wrote {target}. Next:")
    # In full, so that the lines work in a shell in which no environment is active.
    programs = variables["@bin@"]
    if not single_file:
        click.echo(f"  {programs}/python -m pip install -e {shlex.quote(f'{target}[test]')}")
    click.echo(f"  {programs}/dynamo serve {shlex.quote(str(target / f'{name}.yaml'))}")
    click.echo(f"  {programs}/python -m pytest {shlex.quote(str(target))}")
    words = " ".join(command_words(kind))
    subject = f"{target / variables['@file@']}.py:{variables['@plugin@']}" if single_file else name
    click.echo(f"  {programs}/dynamo conformance {words} {shlex.quote(subject)} {request_option(kind)}".rstrip())


def _add_command(word: str, phrase: str) -> None:
    """Add the command that writes plugins of a kind."""

    def write(name: str, path: Path, single_file: bool, reasoning: bool = False) -> None:
        kind = {False: "tool_parser", True: "reasoning_parser"}[reasoning] if word == "parser" else word
        write_plugin(kind, name, path, single_file=single_file)

    article = "an" if phrase[0] in "aeiou" else "a"
    parameters: list[click.Parameter] = [
        click.Argument(["name"]),
        click.Option(
            ["--path"],
            type=click.Path(path_type=Path, file_okay=False),
            default=Path(),
            show_default="the current folder",
            help="The folder in which to make the plugin's own folder.",
        ),
        click.Option(
            ["--single-file"],
            is_flag=True,
            help="Write one Python file, its tests and a config that names the file, instead of a package.",
        ),
    ]
    if word == "parser":
        parameters.append(
            click.Option(["--reasoning"], is_flag=True, help="A parser of reasoning, instead of one of tool calls.")
        )
    command.add_command(
        click.Command(
            word,
            callback=write,
            params=parameters,
            help=f"""Write {article} {phrase} plugin that installs, serves, and passes its own tests.

NAME is what `use:` will say in config files. It {ALLOWED}, such as my-{word}, and is not that of {article} {phrase}
that is installed.
""",
            short_help=f"Write {article} {phrase} plugin.",
        )
    )


for _kind in TEMPLATES:
    if command_words(_kind) == [_kind]:
        _add_command(_kind, TEMPLATES[_kind].phrase)
_add_command("parser", "parser")
