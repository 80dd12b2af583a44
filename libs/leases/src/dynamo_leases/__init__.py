"""What discoveries share: leases kept alive, stores followed, watches notified.

The names are loaded when first used, so that a plugin pays for those that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_leases.failures import LeaseFailureTracker, Refused
    from dynamo_leases.fanout import Fanout
    from dynamo_leases.follower import Follower, OnChange
    from dynamo_leases.heartbeat_thread import HeartbeatThread
    from dynamo_leases.json_client import Json, JsonClient, JsonStream, NotSpoken, StreamEnded, untrusted
    from dynamo_leases.lease import HeartbeatLease, new_lease_id
    from dynamo_leases.line_decoder import LineDecoder
    from dynamo_leases.poller import Poller
    from dynamo_leases.records import MAX_KEY, NO_LEASE, check_record
    from dynamo_leases.remote import RemoteDiscovery, Session
    from dynamo_leases.times import check_times, check_ttl, heartbeat_interval

_HOME = {
    "Fanout": "fanout",
    "Follower": "follower",
    "HeartbeatLease": "lease",
    "HeartbeatThread": "heartbeat_thread",
    "LeaseFailureTracker": "failures",
    "LineDecoder": "line_decoder",
    "MAX_KEY": "records",
    "NO_LEASE": "records",
    "OnChange": "follower",
    "Poller": "poller",
    "Refused": "failures",
    "RemoteDiscovery": "remote",
    "Session": "remote",
    "check_record": "records",
    "check_times": "times",
    "check_ttl": "times",
    "heartbeat_interval": "times",
    "new_lease_id": "lease",
    "Json": "json_client",
    "JsonClient": "json_client",
    "JsonStream": "json_client",
    "NotSpoken": "json_client",
    "StreamEnded": "json_client",
    "untrusted": "json_client",
}

__all__ = [
    "MAX_KEY",
    "NO_LEASE",
    "Fanout",
    "Follower",
    "HeartbeatLease",
    "HeartbeatThread",
    "Json",
    "JsonClient",
    "JsonStream",
    "LeaseFailureTracker",
    "LineDecoder",
    "NotSpoken",
    "OnChange",
    "Poller",
    "Refused",
    "RemoteDiscovery",
    "Session",
    "StreamEnded",
    "check_record",
    "check_times",
    "check_ttl",
    "heartbeat_interval",
    "new_lease_id",
    "untrusted",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dynamo_leases.{_HOME[name]}"), name)
