"""What the checks of transports over a message broker are made of; see `dynamo_testing.brokered_kit`."""
