from dynamo_leases.failures import LeaseFailureTracker as LeaseFailureTracker
from dynamo_leases.failures import Refused as Refused
from dynamo_leases.fanout import Fanout as Fanout
from dynamo_leases.follower import Follower as Follower
from dynamo_leases.follower import OnChange as OnChange
from dynamo_leases.heartbeat_thread import HeartbeatThread as HeartbeatThread
from dynamo_leases.json_client import Json as Json
from dynamo_leases.json_client import JsonClient as JsonClient
from dynamo_leases.json_client import JsonStream as JsonStream
from dynamo_leases.json_client import StreamEnded as StreamEnded
from dynamo_leases.json_client import UnsupportedServer as UnsupportedServer
from dynamo_leases.json_client import untrusted as untrusted
from dynamo_leases.lease import HeartbeatLease as HeartbeatLease
from dynamo_leases.lease import new_lease_id as new_lease_id
from dynamo_leases.line_decoder import LineDecoder as LineDecoder
from dynamo_leases.poller import Poller as Poller
from dynamo_leases.records import MAX_KEY as MAX_KEY
from dynamo_leases.records import NO_LEASE as NO_LEASE
from dynamo_leases.records import check_record as check_record
from dynamo_leases.remote import RemoteDiscovery as RemoteDiscovery
from dynamo_leases.remote import Session as Session
from dynamo_leases.times import check_times as check_times
from dynamo_leases.times import check_ttl as check_ttl
from dynamo_leases.times import heartbeat_interval as heartbeat_interval

__all__: list[str]
