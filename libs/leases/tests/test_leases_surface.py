"""The names that plugins import."""

from __future__ import annotations

import dynamo_leases
import pytest


def test_exported_members() -> None:
    assert sorted(dynamo_leases.__all__) == [
        "Fanout",
        "Follower",
        "HeartbeatLease",
        "HeartbeatThread",
        "Json",
        "JsonClient",
        "JsonStream",
        "LeaseFailureTracker",
        "LineDecoder",
        "MAX_KEY",
        "NO_LEASE",
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
    assert set(dynamo_leases._HOME) == set(dynamo_leases.__all__)
    assert all(getattr(dynamo_leases, name) is not None for name in dynamo_leases.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dynamo_leases.no_such_name
