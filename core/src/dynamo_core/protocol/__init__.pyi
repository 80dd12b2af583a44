from dynamo_core.protocol.annotated import Annotated as Annotated
from dynamo_core.protocol.decoding import UNREADABLE as UNREADABLE
from dynamo_core.protocol.decoding import Unreadable as Unreadable
from dynamo_core.protocol.decoding import read as read
from dynamo_core.protocol.decoding import read_json as read_json
from dynamo_core.protocol.decoding import truncated as truncated
from dynamo_core.protocol.ids import format_instance_id as format_instance_id
from dynamo_core.protocol.ids import parse_instance_id as parse_instance_id
from dynamo_core.protocol.records import ACCEPTED_PROTOS as ACCEPTED_PROTOS
from dynamo_core.protocol.records import CHAT as CHAT
from dynamo_core.protocol.records import COMPLETIONS as COMPLETIONS
from dynamo_core.protocol.records import EMBEDDINGS as EMBEDDINGS
from dynamo_core.protocol.records import EVENT_SOURCES as EVENT_SOURCES
from dynamo_core.protocol.records import PROTO as PROTO
from dynamo_core.protocol.records import EventSource as EventSource
from dynamo_core.protocol.records import FrontendRecord as FrontendRecord
from dynamo_core.protocol.records import Instance as Instance
from dynamo_core.protocol.records import ModelCard as ModelCard
from dynamo_core.protocol.records import RequestRecord as RequestRecord
from dynamo_core.protocol.records import RuntimeConfig as RuntimeConfig
from dynamo_core.protocol.unreadable_warnings import UnreadableWarner as UnreadableWarner

__all__: list[str]
