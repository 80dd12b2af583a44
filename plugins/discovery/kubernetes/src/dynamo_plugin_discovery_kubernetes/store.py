"""The store as this plugin uses it: leases, records and listings."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynamo_core.errors import CannotConnect
from dynamo_leases import NO_LEASE, Json, UnsupportedServer

from dynamo_plugin_discovery_kubernetes.client import Client, Events
from dynamo_plugin_discovery_kubernetes.errors import CONFLICT, GONE, NOT_FOUND, Denied, NoNamespace, Status
from dynamo_plugin_discovery_kubernetes.objects import LeaseFact, Objects, owner, record_fact, version

log = logging.getLogger(__name__)

#: Objects of one answer.
PAGE = 500
#: Attempts at what others change at the same time.
ATTEMPTS = 4
#: Heartbeats after which a lease looks what the server has of it.
LOOK_EVERY = 20

#: What is asked, and never written, to find out what is permitted.
_DRY = {"dryRun": "All"}


@dataclass(slots=True)
class _Granted:
    """A lease of this process, as the server had it last."""

    ttl: float
    uid: str
    version: str
    #: Keys whose records have been written.
    keys: set[str] = field(default_factory=set)
    #: Heartbeats until the server is asked what it has; at once if a request failed on the way.
    look_in: int = field(default_factory=lambda: LOOK_EVERY)


class Store:
    """Every method raises `CannotConnect` if the server cannot be asked, `Refused` if it says no."""

    def __init__(self, client: Client, objects: Objects, pod: str | None) -> None:
        """`pod` is to own the leases."""
        self.client = client
        self.objects = objects
        self._pod = pod
        self._owner: Json | None = None
        self._granted: dict[int, _Granted] = {}
        #: Names of objects that this process has written, and that are replaced rather than made.
        self._written: set[str] = set()

    # Leases.

    async def grant(self, lease: int, ttl: float) -> None:
        """Make a lease; one that is there is fine. `ttl` in seconds."""
        own = await self._find_owner()
        for _ in range(ATTEMPTS):
            try:
                made = await self._ask("POST", self.objects.leases, body=self.objects.lease(lease, ttl, own))
            except Status as error:
                if error.code != CONFLICT:
                    raise _unexpected(error) from error
                # The answer to an earlier attempt was lost: ids are drawn at random out of 2**63.
                found = await self._lease(lease)
                if found is None:
                    continue
                made = found
            self._granted[lease] = _Granted(ttl, made["metadata"]["uid"], made["metadata"]["resourceVersion"])
            return
        raise _busy("the lease")

    async def keep_alive(self, lease: int) -> set[str] | None:
        """Renew a lease. The keys that it holds; None if it is gone."""
        granted = self._granted.get(lease)
        if granted is None or not await self._renew(lease, granted):
            self._granted.pop(lease, None)
            return None
        granted.look_in -= 1
        if granted.look_in <= 0:
            granted.keys = await self._keys(lease)
            granted.look_in = LOOK_EVERY
        return set(granted.keys)

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it its records; one that is gone is fine."""
        self._granted.pop(lease, None)
        await self._delete(
            f"{self.objects.leases}/{self.objects.lease_name(lease)}", {"propagationPolicy": "Background"}
        )

    async def put(self, lease: int, key: str, value: bytes) -> bool:
        """Write a record, whichever lease held the key; False if there is no such lease."""
        granted = self._granted.get(lease)
        if granted is None:
            return False
        own = owner("coordination.k8s.io/v1", "Lease", self.objects.lease_name(lease), granted.uid)
        try:
            await self._write(self.objects.record(lease, key, value, own))
        except CannotConnect:
            granted.look_in = 0
            raise
        granted.keys.add(key)
        return True

    async def reclaim(self, lease: int, key: str, value: bytes) -> bool:
        """Write a record that is missing. No other lease can have taken it: every lease has objects of its own."""
        if not await self.put(lease, key, value):
            raise CannotConnect("Kubernetes has ended the lease meanwhile")
        return True

    async def remove(self, lease: int, key: str) -> None:
        """Remove a record if this lease holds it."""
        granted = self._granted.get(lease)
        try:
            await self._remove(self.objects.record_name(lease, key))
        except CannotConnect:
            if granted is not None:
                granted.look_in = 0
            raise
        if granted is not None:
            granted.keys.discard(key)

    async def clear_away(self, lease: LeaseFact) -> None:
        """Remove a lease whose process died, and its records with it, unless it has been renewed meanwhile."""
        only = {"uid": lease.uid, "resourceVersion": str(lease.version)}
        body = {"propagationPolicy": "Background", "preconditions": only}
        await self._delete(f"{self.objects.leases}/{self.objects.lease_name(lease.number)}", body)

    # Values.

    async def put_value(self, key: str, value: bytes | None) -> None:
        """Write a value that outlives its writer; None removes it. The last writer wins."""
        if value is None:
            await self._remove(self.objects.record_name(NO_LEASE, key))
        else:
            await self._write(self.objects.record(NO_LEASE, key, value, None))

    # Reading.

    async def listing(self, path: str) -> tuple[int, list[Json]]:
        """Return all objects of this system in a collection, and the version that they are of."""
        return await self._list(path, {"labelSelector": self.objects.selector})

    @asynccontextmanager
    async def changes(self, path: str, since: int, seconds: float) -> AsyncIterator[Events]:
        """Yield the changes of a collection since a version, for so many seconds.

        Raises:
            Status: `GONE` if the server has forgotten them.
        """
        query = {
            "labelSelector": self.objects.selector,
            "resourceVersion": str(since),
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        try:
            async with self.client.watch(path, query) as events:
                yield events
        except Status as error:
            if error.code != GONE:
                raise _unexpected(error) from error
            raise

    async def probe(self) -> None:
        """Find out whether everything is permitted that will be needed, and write nothing."""
        await self._find_owner()
        objects = self.objects
        for path, item in (
            (objects.leases, objects.lease(NO_LEASE, 1, None)),
            (objects.records, objects.record(NO_LEASE, "-", b"", None)),
        ):
            newest, _ = await self.listing(path)
            async with self.changes(path, newest, 1):
                pass
            absent = f"{path}/{item['metadata']['name']}"
            await self._permitted("POST", path, _DRY, item)
            await self._permitted("PUT", absent, _DRY, item)
            await self._permitted("DELETE", absent, _DRY)
        await self._permitted("GET", f"{objects.leases}/{objects.lease_name(NO_LEASE)}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _renew(self, lease: int, granted: _Granted) -> bool:
        """Return whether it was there to be renewed."""
        name = f"{self.objects.leases}/{self.objects.lease_name(lease)}"
        for _ in range(ATTEMPTS):
            body = self.objects.lease(lease, granted.ttl, self._owner, granted.version)
            try:
                renewed = await self._ask("PUT", name, body=body)
            except Status as error:
                if error.code == NOT_FOUND:
                    return False
                if error.code != CONFLICT:
                    raise _unexpected(error) from error
                # Another program has changed it, such as a label. What counts is that it is still there, and the same.
                found = await self._lease(lease)
                if found is None or found["metadata"]["uid"] != granted.uid:
                    return False
                renewed = None
                granted.version = found["metadata"]["resourceVersion"]
            if renewed is not None:
                granted.version = renewed["metadata"]["resourceVersion"]
                return True
        raise _busy("the lease")

    async def _lease(self, lease: int) -> Json | None:
        try:
            return await self._ask("GET", f"{self.objects.leases}/{self.objects.lease_name(lease)}")
        except Status as error:
            if error.code != NOT_FOUND:
                raise _unexpected(error) from error
            return None

    async def _keys(self, lease: int) -> set[str]:
        _, items = await self._list(self.objects.records, {"labelSelector": self.objects.of_lease(lease)})
        facts = (record_fact(item) for item in items)
        return {fact.key for fact in facts if fact is not None}

    async def _find_owner(self) -> Json | None:
        """Return the pod; asked once. A lease without an owner only expires."""
        if self._owner is not None or self._pod is None:
            return self._owner
        try:
            pod = await self._ask("GET", f"{self.objects.pods}/{self._pod}")
        except (Status, Denied) as error:
            log.warning("leases are owned by no pod, and expire only: %s", error)
            self._pod = None
            return None
        self._owner = owner("v1", "Pod", self._pod, pod["metadata"]["uid"])
        return self._owner

    async def _write(self, item: Json) -> None:
        """Make an object or replace it, whatever others do at the same time."""
        name = item["metadata"]["name"]
        there = name in self._written
        for _ in range(ATTEMPTS):
            try:
                if there:
                    await self._ask("PUT", f"{self.objects.records}/{name}", body=item)
                else:
                    await self._ask("POST", self.objects.records, body=item)
            except Status as error:
                if error.code == NOT_FOUND and there:
                    there = False
                elif error.code == CONFLICT:
                    there = there or error.reason == "AlreadyExists"
                else:
                    raise _unexpected(error) from error
            else:
                self._written.add(name)
                return
        raise _busy("the record")

    async def _remove(self, name: str) -> None:
        self._written.discard(name)
        await self._delete(f"{self.objects.records}/{name}")

    async def _delete(self, path: str, options: Json | None = None) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions"} | (options or {})
        try:
            await self._ask("DELETE", path, body=body)
        except Status as error:
            # Gone already, or renewed in spite of the preconditions.
            if error.code not in (NOT_FOUND, CONFLICT):
                raise _unexpected(error) from error

    async def _list(self, path: str, query: dict[str, str]) -> tuple[int, list[Json]]:
        for _ in range(ATTEMPTS):
            items: list[Json] = []
            more: dict[str, str] = {}
            try:
                while True:
                    page = await self._ask("GET", path, query | {"limit": str(PAGE)} | more)
                    items += page.get("items") or []
                    proceed = page["metadata"].get("continue")
                    if not proceed:
                        return version(page), items
                    more = {"continue": proceed}
            except Status as error:
                # The pages are of one version, which the server may forget while they are read.
                if error.code != GONE:
                    raise UnsupportedServer(f"Kubernetes does not list {path}: {error}", cause=error) from error
        raise _busy("what is being read")

    async def _permitted(
        self, method: str, path: str, query: dict[str, str] | None = None, body: Json | None = None
    ) -> None:
        try:
            await self._ask(method, path, query, body)
        except Status as error:
            # It would have been done, were the object there, or not there.
            if method == "POST" and error.code == NOT_FOUND:
                raise NoNamespace(f"Kubernetes says: {error}", cause=error) from error

    async def _ask(self, method: str, path: str, query: dict[str, str] | None = None, body: Json | None = None) -> Json:
        return await self.client.ask(method, path, query, body)


def _unexpected(error: Status) -> CannotConnect:
    return CannotConnect(f"Kubernetes says: {error}", cause=error)


def _busy(what: str) -> CannotConnect:
    return CannotConnect(f"Kubernetes: {what} is changed by others again and again")
