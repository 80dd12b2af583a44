"""The checks of the discovery kit, by promise; `dynamo_core.testing.discovery_kit` puts them together."""
