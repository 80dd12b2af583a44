"""All distributions have one version, and one command changes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import versions

ROOT = Path(__file__).parents[2]


def test_all_manifests_and_pins_have_the_version_of_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert versions.main([], ROOT) == 0, capsys.readouterr().out


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return what has a version, of this tree."""
    for pattern in versions.PLACES:
        for path in ROOT.glob(pattern):
            to = tmp_path / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    return tmp_path


def test_the_command_sets_version_and_pins_everywhere(copy: Path) -> None:
    assert versions.main(["4.5.6"], copy) == 0

    for path in copy.glob("plugins/*/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        ours = [name for name in project["dependencies"] if name.startswith("dynamo-")]
        assert project["version"] == "4.5.6"
        assert ours
        assert all(name.endswith("~=4.5.0") for name in ours), path
    assert versions.version_of(copy) == "4.5.6"
    assert 'appVersion: "4.5.6"' in (copy / "deploy/helm/dynamo/Chart.yaml").read_text()
    assert '"4.5.6"' in (copy / "deploy/kustomize/base/kustomization.yaml").read_text()
    assert "dynamo-core~=4.5.0" in (copy / "docs/how-to/package-a-plugin.md").read_text()
    assert versions.main([], copy) == 0


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plugins/discovery/memory/pyproject.toml", 'version = "0.0.1"'),
        ("plugins/discovery/memory/pyproject.toml", '"dynamo-core~=0.0.1"'),
    ],
)
def test_a_place_that_was_forgotten_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str], file: str, text: str
) -> None:
    place, version = copy / file, versions.version_of(copy)
    key = text.split("0.0.1")[0]
    place.write_text(place.read_text().replace(key + version, key + "0.0.1"))

    assert versions.main([], copy) == 1
    assert f"{file}: not all of it has version {version}" in capsys.readouterr().out


@pytest.mark.full
def test_a_wheel_is_built_from_the_source_distribution_of_a_plugin(tmp_path: Path) -> None:
    folder, version = ROOT / "plugins/discovery/memory", versions.version_of(ROOT)
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run([*build, "-t", "sdist"], cwd=folder, check=True, capture_output=True)
    name = f"dynamo_plugin_discovery_memory-{version}"
    shutil.unpack_archive(tmp_path / f"{name}.tar.gz", tmp_path)

    subprocess.run([*build, "-t", "wheel"], cwd=tmp_path / name, check=True, capture_output=True)

    assert (tmp_path / f"{name}-py3-none-any.whl").exists()
