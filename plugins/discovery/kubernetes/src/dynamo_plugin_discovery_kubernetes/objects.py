"""Leases and records as Kubernetes objects.

A lease is a `Lease`, owned by the pod. A record is a `ConfigMap`, owned by its lease; without an owner it is a value
that outlives its writer. Both carry a label with the system's prefix, by which they are found.
"""

from __future__ import annotations

import hashlib
import logging
import math
from base64 import b64decode, b64encode
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dynamo_core.protocol import UNREADABLE, UnreadableWarner
from dynamo_leases import NO_LEASE

log = logging.getLogger(__name__)

Json = dict[str, Any]

_DOMAIN = "discovery.dynamo"
_SYSTEM = f"{_DOMAIN}/system"
_LEASE = f"{_DOMAIN}/lease"
_KEY = f"{_DOMAIN}/key"
#: Changes with every put, so that the server never takes one for no change: the last one counts.
_PUT = f"{_DOMAIN}/put-at"
_VALUE = "value"
#: What reading the fields of a foreign object raises.
_FOREIGN = (LookupError, TypeError, AttributeError, *UNREADABLE)

_left_out = UnreadableWarner(log, "the object")


@dataclass(frozen=True, slots=True)
class LeaseFact:
    """A lease as the server has it.

    `ttl` in seconds; `renewed` is the server's text, `renewed_at` the same in seconds since 1970.
    """

    number: int
    uid: str
    version: int
    ttl: float
    renewed: str
    renewed_at: float


@dataclass(frozen=True, slots=True)
class RecordFact:
    """A record as the server has it; `lease` is `NO_LEASE` for a value that outlives its writer."""

    name: str
    version: int
    lease: int
    key: str
    value: bytes


class Objects:
    """Makes and reads the objects of one system."""

    def __init__(self, namespace: str, prefix: str, holder: str) -> None:
        """`holder` says whose leases they are, for people."""
        base = f"namespaces/{namespace}"
        self.leases = f"/apis/coordination.k8s.io/v1/{base}/leases"
        self.records = f"/api/v1/{base}/configmaps"
        self.pods = f"/api/v1/{base}/pods"
        self.selector = f"{_SYSTEM}={prefix}"
        self._prefix = prefix
        self._holder = holder

    def lease_name(self, lease: int) -> str:
        """Return the name of the object of a lease."""
        return f"{self._prefix}-{lease:016x}"

    def lease(self, lease: int, ttl: float, owner: Json | None, version: str | None = None) -> Json:
        """Return a lease that is renewed now; `version` is what it replaces."""
        metadata = self._metadata(self.lease_name(lease), lease, owner)
        if version is not None:
            metadata["resourceVersion"] = version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._holder,
                "leaseDurationSeconds": math.ceil(ttl),
                "renewTime": _now(),
            },
        }

    def record_name(self, lease: int, key: str) -> str:
        """Return the name of the object of a record: one per lease and key, so that no lease writes that of another."""
        digest = hashlib.sha256(key.encode()).hexdigest()[:40]
        return f"{self._prefix}-value-{digest}" if lease == NO_LEASE else f"{self.lease_name(lease)}-{digest}"

    def record(self, lease: int, key: str, value: bytes, owner: Json | None) -> Json:
        """Return a record."""
        metadata = self._metadata(self.record_name(lease, key), lease, owner)
        metadata["annotations"] = {_KEY: key, _PUT: _now()}
        data = {_VALUE: b64encode(value).decode()}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}

    def of_lease(self, lease: int) -> str:
        """Select the records of one lease."""
        return f"{self.selector},{_LEASE}={lease:016x}"

    def _metadata(self, name: str, lease: int, owner: Json | None) -> Json:
        labels = {_SYSTEM: self._prefix, "app.kubernetes.io/managed-by": "dynamo"}
        if lease != NO_LEASE:
            labels[_LEASE] = f"{lease:016x}"
        return {"name": name, "labels": labels, "ownerReferences": [] if owner is None else [owner]}


def owner(api: str, kind: str, name: str, uid: str) -> Json:
    """Return what makes an object vanish with another."""
    return {"apiVersion": api, "kind": kind, "name": name, "uid": uid}


def version(item: Json) -> int:
    """Return the version of an object or a list: of one kind, the newer one's is the greater number."""
    return int(item["metadata"]["resourceVersion"])


def lease_fact(item: Json) -> LeaseFact | None:
    """Return a lease; None for a foreign object."""
    try:
        metadata, spec = item["metadata"], item["spec"]
        number = int(metadata["labels"][_LEASE], 16)
        renewed = spec["renewTime"]
        at = datetime.fromisoformat(renewed).timestamp()
        ttl = float(spec["leaseDurationSeconds"])
        if not 0 < ttl < math.inf:
            raise ValueError("its life is no time")
        return LeaseFact(number, metadata["uid"], version(item), ttl, renewed, at)
    except _FOREIGN:
        _leave_out(item)
        return None


def record_fact(item: Json) -> RecordFact | None:
    """Return a record; None for a foreign object."""
    try:
        metadata = item["metadata"]
        lease = metadata["labels"].get(_LEASE)
        value = b64decode(item["binaryData"][_VALUE], validate=True)
        number = NO_LEASE if lease is None else int(lease, 16)
        return RecordFact(metadata["name"], version(item), number, metadata["annotations"][_KEY], value)
    except _FOREIGN:
        _leave_out(item)
        return None


def lease_number(item: Json) -> int | None:
    """Return whose lease an object is; None if it is none."""
    try:
        return int(item["metadata"]["labels"][_LEASE], 16)
    except _FOREIGN:
        return None


def _leave_out(item: Json) -> None:
    metadata = item.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    _left_out.warn(str(name), "it is no object of discovery")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
