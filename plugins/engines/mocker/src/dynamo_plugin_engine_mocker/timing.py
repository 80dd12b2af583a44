"""The duration of a step, and the time of the next one."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_plugin_engine_mocker.clock import Clock
from dynamo_plugin_engine_mocker.config import MockerConfig

#: (tokens prefilled in the step, requests decoding in it, share of the KV cache in use) -> seconds.
StepTime = Callable[[int, int, float], float]

#: Tokens -> seconds until their KV cache has come from the worker that computed it.
TransferTime = Callable[[int], float]


def prefill_ms(tokens: int) -> float:
    """Return milliseconds to prefill so many new tokens in one step."""
    if tokens == 0:
        return 0.0
    return 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142


def decode_ms(kv_usage: float) -> float:
    """Return milliseconds for one token of every running request, with this share (0 to 1) of the KV cache in use."""
    share = min(kv_usage, 1.0)
    return max(1.0, -25.74 * share * share + 54.01 * share + 5.74)


def step_time(config: MockerConfig) -> StepTime:
    """Return the duration of steps under these settings."""
    if config.fixed_itl_ms is not None:
        fixed = config.fixed_itl_ms / 1000
        return lambda prefill_tokens, decoding, kv_usage: fixed
    if config.speedup_ratio == 0:
        return lambda prefill_tokens, decoding, kv_usage: 0.0
    scale = 1000 * config.speedup_ratio
    decode_ratio = config.decode_speedup_ratio

    def by_formula(prefill_tokens: int, decoding: int, kv_usage: float) -> float:
        decode = decode_ms(kv_usage) / decode_ratio if decoding else 0.0
        return (prefill_ms(prefill_tokens) + decode) / scale

    return by_formula


def transfer_time(config: MockerConfig) -> TransferTime:
    """Return how long the KV cache of a prompt is on its way under these settings."""
    if config.kv_transfer_bandwidth == 0 or config.speedup_ratio == 0:
        return lambda tokens: 0.0
    per_token = config.kv_bytes_per_token / (config.kv_transfer_bandwidth * 1e9 * config.speedup_ratio)
    return lambda tokens: tokens * per_token


class Pacer:
    """Keeps steps on an absolute schedule: a late step does not push back the ones after it.

    At most one step is caught up; a longer delay starts a new schedule, so that a stall is not followed by
    a burst.
    """

    __slots__ = ("_clock", "_due")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due = clock.time()

    def restart(self) -> None:
        """Begin the schedule now, after a time without work."""
        self._due = self._clock.time()

    async def wait(self, seconds: float) -> None:
        """Return when a step of this duration, begun when the one before was due, is over."""
        due = self._due + seconds
        now = self._clock.time()
        if now - due > seconds:
            due = now
        self._due = due
        await self._clock.sleep_until(due)
