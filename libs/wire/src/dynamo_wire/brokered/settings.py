"""The settings shared by all transports over a broker."""

from __future__ import annotations

from typing import Self

from dynamo_core import PluginConfig, SettingsMismatch
from pydantic import Field, model_validator

#: Seconds that a caller may be silent where `silence` is not set: nothing waits for it but what it has called.
CALLERS_SILENCE = 60.0


class BrokeredConfig(PluginConfig):
    """The bounds of calls and of the connection. Times in seconds."""

    max_message_mb: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="The largest request or item in MiB; what is too much for one message goes in parts.",
    )
    checksum: bool = Field(
        default=True,
        description="Whether messages carry a checksum, so that what is changed on their way ends what they belong to.",
    )
    start_timeout: float = Field(
        default=30.0, gt=0, description="How long a starting process waits for a server that is not there yet."
    )
    connect_timeout: float = Field(default=5.0, gt=0, description="How long one attempt to connect may take.")
    reconnect_wait: float = Field(
        default=2.0, gt=0, description="The longest pause between two attempts to connect again, varied by half."
    )
    unavailable_wait: float = Field(
        default=4.5, ge=0, description="How long a new call waits for a server that is gone; then it is refused."
    )
    accept_timeout: float = Field(default=5.0, gt=0, description="How long a worker may take to accept a call.")
    heartbeat: float = Field(
        default=1.0, gt=0, description="A process with open calls that was silent this long is asked for life."
    )
    silence: float | None = Field(
        default=None,
        gt=0,
        description="A process that did not answer for this long is given up, unless a thread of the worker says that "
        f"its event loop is busy; null means the life of the worker's lease and a second, and {CALLERS_SILENCE:g} for "
        "what workers allow callers.",
    )
    idle_timeout: float = Field(
        default=300.0, gt=0, description="What a caller and a worker know of each other is forgotten after this."
    )
    write_high_water_kb: int = Field(
        default=256, ge=1, description="KiB that may wait for the server before calls have to wait too."
    )
    max_callers: int = Field(default=1024, ge=1, description="Processes that may call one worker at a time.")
    max_streams: int = Field(default=10_000, ge=1, description="Calls that may run between two processes.")
    event_backlog: int = Field(
        default=10_000, ge=1, description="Events that may wait for a publisher or subscriber; more are dropped."
    )

    @model_validator(mode="after")
    def _silence_is_several_heartbeats(self) -> Self:
        if self.silence is not None and self.silence < 2 * self.heartbeat:
            raise SettingsMismatch("`silence` must be at least twice `heartbeat`")
        return self

    @property
    def callers_silence(self) -> float:
        """Seconds that a caller may be silent."""
        return CALLERS_SILENCE if self.silence is None else self.silence

    @property
    def max_message(self) -> int:
        """The largest message in bytes."""
        return self.max_message_mb * 1024 * 1024

    @property
    def write_high_water(self) -> int:
        """Bytes that may wait for the server."""
        return self.write_high_water_kb * 1024
