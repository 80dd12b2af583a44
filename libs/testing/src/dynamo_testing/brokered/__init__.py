"""The checks of transports over a message broker; see `dynamo_testing.brokered_kit`."""
