"""The checks of `dynamo_testing.router_kit`, by promise."""
