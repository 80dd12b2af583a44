"""Subscription to one rank's ZMQ publisher of vLLM: events in order, with missed ones fetched again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from dynamo_core import KvCleared, KvEvent
from dynamo_core.protocol import UNREADABLE, UnreadableWarner, read

from dynamo_plugin_engine_vllm.events import Change, EventTranslator

#: Seconds for the publisher to answer a request for old batches.
REPLAY_TIMEOUT = 5.0
#: How the publisher says that there are no more of them.
_END = (2**64 - 1).to_bytes(8, "big")

log = logging.getLogger(__name__)


class EventSequencer:
    """A sequencer of batches by number: duplicates are dropped, and a permanent loss clears the cache.

    `emit` is called with every event, numbered from 0 without a gap.
    """

    def __init__(self, rank: int, translator: EventTranslator, emit: Callable[[KvEvent], None]) -> None:
        self._rank = rank
        self._translator = translator
        self._emit_event = emit
        self._decoder = msgspec.msgpack.Decoder()
        self._unreadable = UnreadableWarner(log, "a batch of KV events of rank")
        self._number = 0
        #: The batch that is to come next.
        self.expected = 0

    def gap(self, sequence: int) -> bool:
        """Return whether batches before this one are missing."""
        return sequence > self.expected

    def batch(self, sequence: int, payload: bytes) -> None:
        """Apply a batch; a gap before it means that batches were lost."""
        if sequence < self.expected:
            return
        if sequence > self.expected:
            log.warning("%d batches of KV events of rank %d were lost", sequence - self.expected, self._rank)
            self._emit(self._translator.clear())
        self.expected = sequence + 1
        try:
            changes = self._translator.changes(read(self._decoder, payload)[1])
        except (LookupError, TypeError, AttributeError, *UNREADABLE) as error:
            # Its changes are unknown, so the contents of the cache are unknown too.
            self._unreadable.warn(str(self._rank), error)
            changes = [self._translator.clear()]
        else:
            self._unreadable.readable(str(self._rank))
        for change in changes:
            self._emit(change)

    def end(self) -> None:
        """End the subscription: the cache is gone."""
        if len(self._translator):
            self._emit(self._translator.clear())

    def _emit(self, change: Change) -> None:
        self._emit_event(KvEvent(self._number, change, self._rank))
        self._number += 1
        if isinstance(change, KvCleared):
            log.debug("the KV cache of rank %d was cleared", self._rank)


async def follow(zmq: Any, endpoint: str, replay: str, sequencer: EventSequencer) -> None:
    """Tell the tale until cancelled. `zmq` is pyzmq, whose `asyncio` part has been imported."""
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        # The publisher keeps what it has sent for longer than any reader should need to catch up.
        subscriber.set_hwm(0)
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        # What was published before, or while the subscription was under way.
        await _catch_up(zmq, context, replay, sequencer)
        while True:
            _, sequence, payload = await subscriber.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if sequencer.gap(number):
                await _catch_up(zmq, context, replay, sequencer)
            sequencer.batch(number, payload)
    finally:
        subscriber.close(linger=0)
        context.term()
        sequencer.end()


async def _catch_up(zmq: Any, context: Any, replay: str, sequencer: EventSequencer) -> None:
    """Fetch every batch from the expected one on that the publisher still has."""
    asker = context.socket(zmq.DEALER)
    try:
        asker.connect(replay)
        await asker.send_multipart([b"", sequencer.expected.to_bytes(8, "big")])
        while await asker.poll(REPLAY_TIMEOUT * 1000):
            *_, sequence, payload = await asker.recv_multipart()
            if sequence == _END:
                return
            sequencer.batch(int.from_bytes(sequence, "big"), payload)
        log.warning("vLLM did not send its old KV events within %g s", REPLAY_TIMEOUT)
    finally:
        asker.close(linger=0)
