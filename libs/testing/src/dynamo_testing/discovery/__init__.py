"""The checks of the discovery kit, by promise; `dynamo_testing.discovery_kit` puts them together."""
