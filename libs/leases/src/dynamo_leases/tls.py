"""The certificates with which a store is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from dynamo_core.contracts.config import PluginConfig, SettingsMismatch
from pydantic import Field, model_validator


class TlsConfig(PluginConfig):
    """Encryption; a certificate that is not for the host that was asked is refused."""

    ca: Path | None = Field(
        default=None,
        description="Who may sign the server's certificate besides the authorities of the system's list, a PEM file.",
    )
    cert: Path | None = Field(
        default=None, description="This process's certificate chain, a PEM file, for a server that asks for one."
    )
    key: Path | None = Field(default=None, description="The private key of `cert`, a PEM file without a passphrase.")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise SettingsMismatch("`cert` and `key` belong together: set both or neither")
        return self
