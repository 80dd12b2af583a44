"""The checks of `dynamo_core.testing.router_kit`, by promise."""
