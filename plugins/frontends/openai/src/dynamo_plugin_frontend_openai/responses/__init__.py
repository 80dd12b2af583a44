"""The Responses API, with or without a memory of earlier requests."""
