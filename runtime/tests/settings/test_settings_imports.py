"""What `dynamo --help` pays for the settings."""

from __future__ import annotations

import subprocess
import sys


def test_the_flag_table_is_read_without_importing_anything_heavy() -> None:
    program = (
        "import sys; from dynamo_runtime.settings import FLAGS; assert FLAGS;"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'pydantic', 'pydantic_settings', 'yaml'})"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout.strip() == ""


def test_every_public_name_can_be_had() -> None:
    import dynamo_runtime.settings as package

    for name in package.__all__:
        assert getattr(package, name) is not None
