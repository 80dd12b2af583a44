"""Whatever leases do, every view ends up with what is really there."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from dynamo_plugin_discovery_file.record import Record, decode, encode, file_name
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(
    st.lists(st.text(min_size=1, max_size=300), unique=True, max_size=5),
    st.binary(max_size=100),
    st.integers(0, 2**63 - 1),
)
def test_every_key_has_a_file_name_of_its_own_and_comes_back(keys: list[str], value: bytes, lease: int) -> None:
    keys = [key for key in keys if len(key.encode("utf-8", "replace")) <= 1024]

    names = [file_name(key) for key in keys]

    assert len(set(names)) == len(names)
    assert all(len(name) < 255 and "/" not in name and not name.startswith(".") for name in names)
    for key in keys:
        record = Record(key, value, lease)
        assert decode(encode(record)) == record


@pytest.mark.parametrize("key", ["..", ".", ".hidden", "a/../b", "%2F", "a\x00b"])
def test_a_key_cannot_leave_the_folder(key: str) -> None:
    assert "/" not in file_name(key)
    assert not file_name(key).startswith(".")
    assert "\x00" not in file_name(key)


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "remove", "close", "kill", "value", "wait", "wait", "poll", "wipe"]),
        st.integers(0, 2),
        st.sampled_from(["a", "b/c", "…"]),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(steps)
def test_a_view_agrees_with_a_model_of_puts_removes_closes_and_deaths(
    make_host: Any, steps: list[tuple[str, int, str]]
) -> None:
    async def play(path: Path) -> None:
        host = make_host(path)
        host.folder().prepare()
        early = host.view()
        leases = [host.lease() for _ in range(3)]
        #: Key to value and owner; owner None is a value that outlives its writer.
        truth: dict[str, tuple[bytes, Any]] = {}

        def taken(key: str, by: Any) -> None:
            # A lease learns at its next heartbeat that another has taken its key.
            owner = truth[key][1] if key in truth else None
            if owner is not None and owner is not by:
                # The first may find that the folder has been wiped, the second registers again.
                owner.beat()
                owner.beat()

        def forget(lease: Any) -> None:
            for key in [key for key, (_, owner) in truth.items() if owner is lease]:
                del truth[key]

        for number, (action, who, key) in enumerate(steps):
            lease, value = leases[who], str(number).encode()
            match action:
                case "put":
                    await lease.put(key, value)
                    taken(key, lease)
                    truth[key] = (value, lease)
                case "remove":
                    await lease.remove(key)
                    if key in truth and truth[key][1] is lease:
                        del truth[key]
                case "close":
                    await lease.aclose()
                    host.alive.remove(lease)
                    forget(lease)
                    leases[who] = host.lease()
                case "kill":
                    host.kill(lease)
                    forget(lease)
                    leases[who] = host.lease()
                case "value":
                    host.put_value(key, value)
                    taken(key, None)
                    truth[key] = (value, None)
                case "wipe":
                    shutil.rmtree(path, ignore_errors=True)
                    for lost in [key for key, (_, owner) in truth.items() if owner is None]:
                        del truth[lost]
                case "wait":
                    host.run(1)
                case _:
                    early.poll()
        # The last to die needs a ttl and a poll; a wiped folder needs two heartbeats and a ttl to be trusted again.
        host.run(6)
        late = host.view()
        late.poll()

        expected = {key: value for key, (value, _) in truth.items()}
        assert early.records == expected
        assert late.records == expected
        host.run(6)
        assert len(list((path / "records").iterdir())) == len(expected)
        assert len(list((path / "leases").iterdir())) >= 3

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder) / "discovery"))
