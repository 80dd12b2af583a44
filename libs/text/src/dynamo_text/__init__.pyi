from dynamo_text.byte_tokenizer import ByteTokenizer as ByteTokenizer
from dynamo_text.detokenizer import Detokenizer as Detokenizer
from dynamo_text.encode import INLINE as INLINE
from dynamo_text.encode import TextEncoder as TextEncoder
from dynamo_text.encode import encode_async as encode_async
from dynamo_text.json_calls import CallArguments as CallArguments
from dynamo_text.json_calls import CallArray as CallArray
from dynamo_text.json_calls import CallObject as CallObject
from dynamo_text.json_calls import CallReader as CallReader
from dynamo_text.json_calls import CallSink as CallSink
from dynamo_text.json_calls import skip_space as skip_space
from dynamo_text.json_calls import surplus_kind as surplus_kind
from dynamo_text.json_value import MAX_DEPTH as MAX_DEPTH
from dynamo_text.json_value import Progress as Progress
from dynamo_text.load import load_tokenizer as load_tokenizer
from dynamo_text.prefix_cache import TokenCacheStore as TokenCacheStore
from dynamo_text.stop_strings import StopStrings as StopStrings
from dynamo_text.stop_strings import compile_stops as compile_stops

__all__: list[str]
