"""Failures of the kit: one class each, with the words of the contract and a remedy."""

from __future__ import annotations

from dynamo_testing.engine.report import ConformanceFailure as ConformanceFailure


class StartFailed(ConformanceFailure):
    """The engine could not be made or started in time."""

    CONTRACT = "`start` returns an `EngineConfig`, and from then on `generate` may be called"
    REMEDY = "mend what `start` raises; give a slow engine a longer start timeout; keep blocking work in a thread"


class EmptyModelInConfig(ConformanceFailure):
    """The engine does not say which model it serves."""

    CONTRACT = "`EngineConfig.model` names the model that was loaded"
    REMEDY = "return `EngineConfig(model=self.worker.model_name)`, or the name that the engine knows"


class MetricsFailed(ConformanceFailure):
    """The engine's own metrics cannot be registered, or cannot be read afterwards."""

    CONTRACT = "`setup_metrics` is called once after `start`; what it registers can be scraped"
    REMEDY = "make metrics with the scope that is given, each name with one type and one set of labels"


class KvEventSourcesFailed(ConformanceFailure):
    """The sources of KV events cannot be had or subscribed to."""

    CONTRACT = "`kv_event_sources` returns `KvEventSource` objects, one per rank, whose `subscribe` takes a function"
    REMEDY = "return a list, one source per rank, and an empty one if the cache is not told of"


class KvEventSourcesNotIdempotent(ConformanceFailure):
    """Asked again, the engine names other ranks."""

    CONTRACT = "asking for the sources changes nothing: the same ranks are named every time"
    REMEDY = "build the sources in `start`, or anew on every call, and begin telling only in `subscribe`"


class LoadSourcesFailed(ConformanceFailure):
    """The sources of loads cannot be had or subscribed to."""

    CONTRACT = "`load_sources` returns `LoadSource` objects, one per rank, whose `subscribe` takes a function"
    REMEDY = "return a list, one source per rank, and an empty one if the load is not told of"


class LoadSourcesNotIdempotent(ConformanceFailure):
    """Asked again, the engine names other ranks."""

    CONTRACT = "asking for the sources changes nothing: the same ranks are named every time"
    REMEDY = "build the sources in `start`, or anew on every call, and begin telling only in `subscribe`"


class GenerateFailed(ConformanceFailure):
    """A plain request was not answered."""

    CONTRACT = "`generate` is an async generator of `LLMEngineOutput` that answers every sound request"
    REMEDY = "run the request by hand, with `mock_context()`, and mend what it raises or waits for"


class NoChunksYielded(ConformanceFailure):
    """The stream ended without a single item."""

    CONTRACT = "a stream has at least one item, its terminal"
    REMEDY = "yield `LLMEngineOutput.stop()` or another terminal on every path that returns"


class StreamYieldedError(ConformanceFailure):
    """The stream of a sound request ended with an error."""

    CONTRACT = "an error ends only the stream of a request that cannot be served"
    REMEDY = "mend what was raised; end a stopped request with `LLMEngineOutput.cancelled()`, not with an exception"


class NoTerminalChunk(ConformanceFailure):
    """The stream ended, or went on for ever, without a terminal item."""

    CONTRACT = "exactly one item, the last, carries a `finish_reason`"
    REMEDY = "end with `LLMEngineOutput.stop()`, `.length()` or `.cancelled()`"


class ChunkAfterTerminal(ConformanceFailure):
    """Something came after the terminal item."""

    CONTRACT = "nothing follows the item that carries a `finish_reason`"
    REMEDY = "`return` right after the terminal; put usage and last tokens into it (`.with_usage`, `.with_tokens`)"


class InvalidTokens(ConformanceFailure):
    """An item carries token ids that are none."""

    CONTRACT = "`token_ids` is a list of plain integers from 0 up to the end of the model's vocabulary"
    REMEDY = "yield `int(token)` or `tensor.tolist()`; give the worker the folder of the model that made the ids"


class InvalidItem(ConformanceFailure):
    """A field of an item is of a wrong type, or an item was changed after it had been yielded."""

    CONTRACT = "an `LLMEngineOutput` is of its declared types, and stays as it was when it was yielded"
    REMEDY = "make a new item for every yield, with `chunk.token(...)`, `LLMEngineOutput.stop()` and `usage(...)`"


class WrongUsage(ConformanceFailure):
    """The usage of an answer does not fit its tokens."""

    CONTRACT = "usage counts the tokens of the prompt and those that were yielded, and may be left out"
    REMEDY = (
        "`usage(len(request.token_ids), sent)`, where `sent` grows with every token that is yielded; or leave it out"
    )


class AnswerRepeated(ConformanceFailure):
    """The engine sent earlier output again."""

    CONTRACT = "an item holds what is new since the item before, also the terminal"
    REMEDY = "yield `tokens[sent:]` of a library that tells the whole answer each time; end with an empty terminal"


class NoDisaggregatedParams(ConformanceFailure):
    """A prefill engine hands nothing over."""

    CONTRACT = "the terminal of a prefill engine carries `disaggregated_params` for the decode engine"
    REMEDY = "set `disaggregated_params` on the terminal item in mode prefill"


class MaxTokensExceeded(ConformanceFailure):
    """More tokens came than the request allows."""

    CONTRACT = "no more than `stop_conditions.max_tokens` tokens come out"
    REMEDY = "count the tokens that are yielded, and end with `LLMEngineOutput.length()` at the limit"


class HealthCheckPayloadFailed(ConformanceFailure):
    """The engine's own health probe is no request, or is not answered."""

    CONTRACT = "`health_check_payload` returns None, or fields of a `PreprocessedRequest` that the engine answers"
    REMEDY = "return a small request, such as `{'token_ids': [1], 'stop_conditions': {'max_tokens': 1}}`"


class ConcurrentGenerateFailed(ConformanceFailure):
    """Streams that are answered one by one are not when several are open at the same time."""

    CONTRACT = "`generate` is called many times at once; every stream ends as it would alone"
    REMEDY = "keep the state of a request in `generate`, not on the engine; let requests beyond its capacity wait"


class RequestsMixed(ConformanceFailure):
    """The engine answers a request differently beside others than alone."""

    CONTRACT = "`generate` is called many times at once, and requests share nothing"
    REMEDY = "keep prompt, counters and output in local variables of `generate`, not on `self`, a class or a module"


class EventLoopBlocked(ConformanceFailure):
    """The engine holds the event loop while it answers."""

    CONTRACT = "nothing that runs in the event loop waits or computes for long: all requests stand still meanwhile"
    REMEDY = "wait with `await asyncio.sleep(...)`; give what blocks to a thread: `await asyncio.to_thread(...)`"


class CancellationNotObserved(ConformanceFailure):
    """A stopped stream went on. `after` is how many seconds after the stop it was given up."""

    CONTRACT = "a stopped stream ends within two seconds"
    REMEDY = "look at `ctx.is_stopped()` before the first yield and between yields; wait with `ctx.on_stop(...)`"

    def __init__(self, seen: str, *, after: float) -> None:
        super().__init__(seen)
        self.after = after


class CancellationIgnored(ConformanceFailure):
    """A stopped stream ended as if it had not been stopped."""

    CONTRACT = "a stopped stream ends with `LLMEngineOutput.cancelled()`"
    REMEDY = (
        "look at `ctx.is_stopped()` before every yield, also that of the last item, "
        "and end with `LLMEngineOutput.cancelled()`"
    )


class QueuedStopIgnored(ConformanceFailure):
    """A request was stopped while it waited for a place, and went on waiting."""

    CONTRACT = "a stopped stream ends within two seconds, also one that has not begun"
    REMEDY = "wait for the place and for `ctx.stopped()` at once, and end with `LLMEngineOutput.cancelled()`"


class AbortFailed(ConformanceFailure):
    """`abort` raised, or did not return."""

    CONTRACT = "`abort` is called at most once, when the client of a request has given up on it"
    REMEDY = "let `abort` pass for requests that the engine does not know, or no longer knows"


class CloseFailed(ConformanceFailure):
    """A stream cannot be closed in the middle."""

    CONTRACT = "the stream of a caller that is lost is closed in the middle, and its `finally` runs"
    REMEDY = "write `generate` as an async generator; yield nothing in a `finally`, and never catch `GeneratorExit`"


class RequestLeaked(ConformanceFailure):
    """After some streams were closed in the middle no new request is answered."""

    CONTRACT = "what a request holds is released however its stream ends"
    REMEDY = "release slots, blocks and map entries in a `finally` inside `generate`"


class EmbeddingFailed(ConformanceFailure):
    """The engine declares embeddings and does not make them."""

    CONTRACT = "with the capability `embed`, `embed` returns one vector per input and counts the tokens"
    REMEDY = "implement `embed`, or leave the capability out of `EngineConfig.capabilities`"


class ScoringFailed(ConformanceFailure):
    """The engine declares scores and does not make them."""

    CONTRACT = "with the capability `score` or `rerank`, `score` returns one score per document and counts the tokens"
    REMEDY = "implement `score`, or leave the capabilities out of `EngineConfig.capabilities`"


class ProgressFailed(ConformanceFailure):
    """The engine declares that it reports progress and does not."""

    CONTRACT = "with the capability `progress`, `progress` returns at once a number that grows while the engine works"
    REMEDY = "count the steps of the engine and return the count, or leave the capability out of the `EngineConfig`"


class KvEventsFailed(ConformanceFailure):
    """The engine's cache events cannot be followed."""

    CONTRACT = "the events of a rank count up by one from 0 and are told in the event loop's thread"
    REMEDY = "number the events of each rank in one place, and hand over with `loop.call_soon_threadsafe`"


class DrainFailed(ConformanceFailure):
    """`drain` raised, or did not return."""

    CONTRACT = "`drain` is called once before `cleanup`, when no new request will come"
    REMEDY = "let `drain` return at once if nothing is left to do"


class CleanupFailed(ConformanceFailure):
    """`cleanup` raised, or did not return."""

    CONTRACT = "`cleanup` releases everything"
    REMEDY = "mend what `cleanup` raises, and give every wait in it a deadline"


class SecondCleanupFailed(ConformanceFailure):
    """A second `cleanup` raised, or did not return."""

    CONTRACT = "`cleanup` is safe twice"
    REMEDY = "take things out of their attributes before releasing them, so that the second call finds nothing"


class CleanupWithoutStartFailed(ConformanceFailure):
    """`cleanup` of an engine that was never started raised, or did not return."""

    CONTRACT = "`cleanup` is safe without any `start`"
    REMEDY = "set everything that `cleanup` uses in the constructor, empty, or None"
