"""Ports of servers that tests start belong to one process each."""

from __future__ import annotations

import subprocess
import sys

from dynamo_testing.servers import ports


def test_a_port_that_one_process_has_is_given_to_no_other() -> None:
    taken = ports.free_port()
    asks = "import sys; from dynamo_testing.servers import ports; print(ports._claim(int(sys.argv[1])))"

    def other(port: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", asks, str(port)], capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    assert other(taken) == "False"
    assert other(19_999) == "True"


def test_no_port_is_given_twice() -> None:
    first = {port for start in (ports.free_port(3) for _ in range(20)) for port in range(start, start + 3)}

    assert len(first) == 60
