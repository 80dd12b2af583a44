"""The one version of all distributions: that of ``core/pyproject.toml``.

    python scripts/versions.py          names every place that has another one; exit code 1 if there is any
    python scripts/versions.py 0.2.0    sets it everywhere

Manifests hold the number itself rather than a way to it: a wheel can be built from a copy of one folder, where a file
that is shared by all would be missing. Pins of our own distributions, which no build backend takes from elsewhere, are
kept by the same means.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

SOURCE = "core/pyproject.toml"

#: A version, and what stands before it.
_VERSION = re.compile(r'^(version = ")[^"]+', re.MULTILINE)
_CHART = re.compile(r'^((?:version|appVersion): "?)[0-9.]+', re.MULTILINE)
_IMAGE = re.compile(r'(name: dynamo, newTag: ")[^"]+')
#: A pin of one of our distributions: releases of one minor version go together.
_PIN = re.compile(r'("dynamo-[a-z-]+(?:\[[a-z,]+\])?~=)[0-9.]+')

#: What is in which files, from the root.
PLACES = {
    SOURCE: (_VERSION, _PIN),
    "libs/*/pyproject.toml": (_VERSION, _PIN),
    "plugins/*/*/pyproject.toml": (_VERSION, _PIN),
    "examples/*/pyproject.toml": (_PIN,),
    "docs/**/*.md": (_PIN,),
    "deploy/helm/*/Chart.yaml": (_CHART,),
    "deploy/kustomize/*/kustomization.yaml": (_IMAGE,),
}


def version_of(root: Path) -> str:
    """Return the version of the tree."""
    manifest = tomllib.loads((root / SOURCE).read_text())
    return str(manifest["project"]["version"])


def changes(root: Path, version: str) -> Iterator[tuple[Path, str]]:
    """Yield the files that do not have this version, each with the text that does."""
    minor = ".".join(version.split(".")[:2]) + ".0"
    for pattern, expressions in PLACES.items():
        for path in sorted(root.glob(pattern)):
            text = changed = path.read_text()
            for expression in expressions:
                number = minor if expression is _PIN else version
                changed = expression.sub(rf"\g<1>{number}", changed)
            if changed != text:
                yield path, changed


def main(arguments: list[str], root: Path = Path(__file__).parents[1]) -> int:
    """Run the command."""
    if not arguments:
        version = version_of(root)
        others = [path.relative_to(root).as_posix() for path, _ in changes(root, version)]
        for other in others:
            print(f"{other}: not all of it has version {version}; `python scripts/versions.py {version}` mends it")
        return 1 if others else 0
    if len(arguments) > 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        print("usage: python scripts/versions.py [MAJOR.MINOR.PATCH]", file=sys.stderr)
        return 2
    for path, text in changes(root, arguments[0]):
        path.write_text(text)
        print(path.relative_to(root).as_posix())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
