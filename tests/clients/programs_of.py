"""How programs of clients are run: each with the packages that it needs, and without a way to other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import HERE

#: The environments with packages of others; `make test-clients` sets them up.
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
#: Programs of Node need no environment, and some packages for Python are where the tests are.
NODE, OWN = "node", ""


def command(environment: str, program: str = "python") -> str:
    """Return the interpreter, or another command, of an environment."""
    if environment == NODE:
        return "node"
    if environment == OWN:
        return sys.executable
    return str(ENVIRONMENTS / environment / "bin" / program)


def printed(*words: str, home: Path, seconds: float = 100) -> str:
    """Return what a program prints, which must end well."""
    ended = subprocess.run(
        words,
        env={
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            # It would ask a server of its makers for the prices of models.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
        },
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
