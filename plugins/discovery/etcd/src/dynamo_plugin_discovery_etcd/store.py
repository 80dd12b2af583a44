"""The store as this plugin uses it: leases, records and listings, each change one step of etcd."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_core.errors import CannotConnect
from dynamo_leases import NO_LEASE

from dynamo_plugin_discovery_etcd.client import Client, Messages
from dynamo_plugin_discovery_etcd.errors import NOT_FOUND, OUT_OF_RANGE, PRECONDITION, Status
from dynamo_plugin_discovery_etcd.wire import Json, Keys, Listing, Record, number, record, text

#: Records of one answer.
PAGE = 500


class Store:
    """Every method raises `CannotConnect` if no server can be asked, `Refused` if one says no."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client = client
        self.keys = keys

    async def grant(self, lease: int, ttl: float) -> None:
        """Make a lease; one that is there is fine. `ttl` in seconds."""
        body = {"ID": str(lease), "TTL": str(math.ceil(ttl))}
        try:
            await self._ask("/v3/lease/grant", body)
        except Status as error:
            # The answer to an earlier attempt was lost: ids are drawn at random out of 2**63.
            if error.code != PRECONDITION:
                raise _unexpected(error) from error

    async def keep_alive(self, lease: int) -> set[str] | None:
        """Renew a lease. The keys that it holds; None if it is gone."""
        answer = await self._plain("/v3/lease/keepalive", {"ID": str(lease)})
        if number(answer, "TTL") <= 0:
            return None
        answer = await self._plain("/v3/lease/timetolive", {"ID": str(lease), "keys": True})
        if number(answer, "TTL") < 0:
            return None
        return {self.keys.name(key) for key in answer.get("keys", ())}

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its records; one that is gone is fine."""
        try:
            await self._ask("/v3/lease/revoke", {"ID": str(lease)})
        except Status as error:
            if error.code != NOT_FOUND:
                raise _unexpected(error) from error

    async def put(self, lease: int, key: str, value: bytes) -> bool:
        """Write a record, whichever lease held the key; False if there is no such lease."""
        try:
            await self._ask("/v3/kv/put", self._record(lease, key, value))
        except Status as error:
            if error.code != NOT_FOUND:
                raise _unexpected(error) from error
            return False
        return True

    async def reclaim(self, lease: int, key: str, value: bytes) -> bool:
        """Write a record unless another lease, or a value without one, has taken its key; whether it was written.

        Raises:
            CannotConnect: also if there is no such lease.
        """
        writes = [{"requestPut": self._record(lease, key, value)}]
        if_own = {"compare": [self._held_by(lease, key)], "success": writes}
        absent = {"key": self.keys.one(key), "target": "VERSION", "result": "EQUAL", "version": "0"}
        body = {"compare": [absent], "success": writes, "failure": [{"requestTxn": if_own}]}
        try:
            answer = await self._ask("/v3/kv/txn", body)
        except Status as error:
            if error.code != NOT_FOUND:
                raise CannotConnect(f"etcd does not keep {key!r}: {error}", cause=error) from error
            raise CannotConnect("etcd has ended the lease meanwhile", cause=error) from error
        if answer.get("succeeded", False):
            return True
        inner = [response.get("response_txn", {}) for response in answer.get("responses", ())]
        return any(response.get("succeeded", False) for response in inner)

    async def remove(self, lease: int, key: str) -> None:
        """Remove a record if this lease holds it."""
        removes = [{"requestDeleteRange": {"key": self.keys.one(key)}}]
        await self._plain("/v3/kv/txn", {"compare": [self._held_by(lease, key)], "success": removes})

    async def put_value(self, key: str, value: bytes | None) -> None:
        """Write a value that outlives its writer; None removes it."""
        if value is None:
            await self.remove(NO_LEASE, key)
        else:
            await self.put(NO_LEASE, key, value)

    async def list(self) -> Listing:
        """Return all records, as of now. Pages are of one revision."""
        body: Json = {"limit": str(PAGE)}
        records: dict[str, Record] = {}
        after: str | None = None
        while True:
            try:
                answer = await self._ask("/v3/kv/range", self.keys.everything(after) | body)
            except Status as error:
                raise _unexpected(error) from error
            page = {self.keys.name(fields["key"]): record(fields) for fields in answer.get("kvs", ())}
            records |= page
            if after is None:
                header = answer["header"]
                body["revision"] = header["revision"]
            if not page or not answer.get("more", False):
                return Listing(number(header, "cluster_id"), number(header, "revision"), records)
            after = next(reversed(page))

    async def newest(self) -> tuple[int, int]:
        """Return the revision of the newest record (0 if there is none), and how many there are."""
        order = {"sort_target": "MOD", "sort_order": "DESCEND", "limit": "1", "keys_only": True}
        answer = await self._plain("/v3/kv/range", self.keys.everything() | order)
        revision = max((number(fields, "mod_revision") for fields in answer.get("kvs", ())), default=0)
        return revision, number(answer, "count")

    async def probe(self) -> None:
        """Find out whether the user may read and write, and write nothing: no version is below 0."""
        await self.list()
        never = {"key": self.keys.one("-"), "target": "VERSION", "result": "LESS", "version": "0"}
        removes = {"requestDeleteRange": self.keys.everything()}
        await self._plain("/v3/kv/txn", {"compare": [never], "success": [removes]})

    @asynccontextmanager
    async def changes(self, revision: int) -> AsyncIterator[Messages]:
        """Yield the changes from a revision on."""
        request = self.keys.everything() | {"start_revision": str(revision)}
        async with self.client.stream("/v3/watch", {"create_request": request}) as messages:
            yield messages

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _ask(self, path: str, body: Json) -> Json:
        return await self.client.ask(path, body)

    async def _plain(self, path: str, body: Json) -> Json:
        """Ask like `_ask`, where nothing can be missing."""
        try:
            return await self.client.ask(path, body)
        except Status as error:
            raise _unexpected(error) from error

    def _record(self, lease: int, key: str, value: bytes) -> Json:
        return {"key": self.keys.one(key), "value": text(value), "lease": str(lease)}

    def _held_by(self, lease: int, key: str) -> Json:
        return {"key": self.keys.one(key), "target": "LEASE", "result": "EQUAL", "lease": str(lease)}


def _unexpected(error: Status) -> CannotConnect:
    what = "has compacted what was being read" if error.code == OUT_OF_RANGE else f"says: {error}"
    return CannotConnect(f"etcd {what}", cause=error)
