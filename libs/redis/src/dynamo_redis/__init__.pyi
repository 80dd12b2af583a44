from dynamo_redis.connect import ReusedConnection as ReusedConnection
from dynamo_redis.connect import client_options as client_options
from dynamo_redis.connect import connection_factory as connection_factory
from dynamo_redis.errors import Fault as Fault
from dynamo_redis.errors import RedisFailure as RedisFailure
from dynamo_redis.errors import config_error as config_error
from dynamo_redis.errors import explain as explain
from dynamo_redis.settings import RedisSettings as RedisSettings
from dynamo_redis.settings import SharedCountSettings as SharedCountSettings

__all__: list[str]
