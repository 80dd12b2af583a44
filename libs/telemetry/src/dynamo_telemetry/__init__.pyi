from dynamo_telemetry.gen_ai import gen_ai_attributes as gen_ai_attributes
from dynamo_telemetry.logs import configure_logging as configure_logging
from dynamo_telemetry.logs import shutdown_logging as shutdown_logging
from dynamo_telemetry.metrics import Counter as Counter
from dynamo_telemetry.metrics import Gauge as Gauge
from dynamo_telemetry.metrics import Metrics as Metrics

__all__: list[str]
