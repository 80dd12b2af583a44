"""Errors of templates."""

from __future__ import annotations

from dynamo_core import DynamoError


class TemplateFault(DynamoError):
    """A chat template took too long, or too much memory, and was stopped. The message is for the client too."""

    public = True
