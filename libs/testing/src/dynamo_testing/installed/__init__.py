"""The kits, run over a plugin that is installed, for the command ``dynamo conformance``."""
