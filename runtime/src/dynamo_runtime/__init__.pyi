from dynamo_runtime.args import CommonArgs as CommonArgs
from dynamo_runtime.args import from_args as from_args
from dynamo_runtime.engine_process import engine_main as engine_main
from dynamo_runtime.engine_process import run as run

__all__: list[str]
