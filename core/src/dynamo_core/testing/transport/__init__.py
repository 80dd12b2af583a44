"""The checks of the transport kit, by promise; `dynamo_core.testing.transport_kit` puts them together."""
