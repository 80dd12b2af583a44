"""Without pytest, importing a class of tests names the package to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: As a Python without these packages finds nothing under their names.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for line in {lines!r}:
    try:
        exec(line)
    except ImportError as error:
        print(error)
"""

CLASSES = [
    "from dynamo_testing import EngineConformance",
    "import dynamo_testing; dynamo_testing.EngineConformance",
    "from dynamo_testing.engine_kit import EngineConformance",
    "from dynamo_testing.transport_kit import TransportKit",
    "from dynamo_testing.events_kit import EventsKit",
    "from dynamo_testing.discovery_kit import DiscoveryKit",
    "from dynamo_testing.router_kit import RouterKit",
    "from dynamo_testing.admission_kit import AdmissionKit",
]


def errors_of(absent: str, *lines: str) -> list[str]:
    """Return what the lines that cannot be run say, in a Python without a package."""
    code = WITHOUT.format(absent=absent, lines=lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=45, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("absent", ["pytest", "pytest_asyncio"])
def test_a_kit_class_names_the_missing_package(absent: str) -> None:
    errors = errors_of(absent, *CLASSES)

    assert len(errors) == len(CLASSES)
    for error in errors:
        assert error.startswith(f"{absent} is not installed, and the kits that are classes of tests need it: ")
        assert "pip install 'dynamo-testing[pytest]'" in error


def test_the_function_needs_nothing_more_than_core() -> None:
    assert errors_of("pytest", "from dynamo_testing import run_conformance, mock_context, StartFailed") == []
