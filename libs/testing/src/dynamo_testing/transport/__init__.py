"""The checks of the transport kit, by promise; `dynamo_testing.transport_kit` puts them together."""
