from dynamo_runtime.engine_process import engine_main as engine_main
from dynamo_runtime.engine_process import run as run
from dynamo_runtime.standalone_engine_args import CommonArgs as CommonArgs
from dynamo_runtime.standalone_engine_args import from_args as from_args

__all__: list[str]
