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


class Model:
    """A folder, three leases on it, and what must be in it. A step is a method."""

    def __init__(self, make_host: Any, path: Path) -> None:
        self.path = path
        self.host = make_host(path)
        self.host.folder().prepare()
        self.early = self.host.view()
        self.leases = [self.host.lease() for _ in range(3)]
        self.puts = 0
        #: Key to value and owner; owner None is a value that outlives its writer.
        self.truth: dict[str, tuple[bytes, Any]] = {}

    async def put(self, who: int, key: str) -> None:
        value = self._next_value()
        await self.leases[who].put(key, value)
        self._take(key, value, self.leases[who])

    async def remove(self, who: int, key: str) -> None:
        await self.leases[who].remove(key)
        if key in self.truth and self.truth[key][1] is self.leases[who]:
            del self.truth[key]

    async def close(self, who: int, _: str) -> None:
        await self.leases[who].aclose()
        self.host.alive.remove(self.leases[who])
        self._replace(who)

    async def kill(self, who: int, _: str) -> None:
        self.host.kill(self.leases[who])
        self._replace(who)

    async def value(self, _: int, key: str) -> None:
        value = self._next_value()
        self.host.put_value(key, value)
        self._take(key, value, None)

    async def wipe(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._forget(None)

    async def wait(self, *_: object) -> None:
        self.host.run(1)

    async def poll(self, *_: object) -> None:
        self.early.poll()

    def _next_value(self) -> bytes:
        self.puts += 1
        return str(self.puts).encode()

    def _take(self, key: str, value: bytes, by: Any) -> None:
        # A lease learns at its next heartbeat that another has taken its key.
        owner = self.truth[key][1] if key in self.truth else None
        if owner is not None and owner is not by:
            # The first may find that the folder has been wiped, the second registers again.
            owner.beat()
            owner.beat()
        self.truth[key] = (value, by)

    def _replace(self, who: int) -> None:
        self._forget(self.leases[who])
        self.leases[who] = self.host.lease()

    def _forget(self, lease: Any) -> None:
        for key in [key for key, (_, owner) in self.truth.items() if owner is lease]:
            del self.truth[key]


@settings(deadline=None)
@given(steps)
def test_a_view_agrees_with_a_model_of_puts_removes_closes_and_deaths(
    make_host: Any, steps: list[tuple[str, int, str]]
) -> None:
    async def play(path: Path) -> None:
        model = Model(make_host, path)
        for action, who, key in steps:
            await getattr(model, action)(who, key)
        # The last to die needs a ttl and a poll; a wiped folder needs two heartbeats and a ttl to be trusted again.
        model.host.run(6)
        late = model.host.view()
        late.poll()

        expected = {key: value for key, (value, _) in model.truth.items()}
        assert model.early.records == expected
        assert late.records == expected
        model.host.run(6)
        assert len(list((path / "records").iterdir())) == len(expected)
        assert len(list((path / "leases").iterdir())) >= 3

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder) / "discovery"))
