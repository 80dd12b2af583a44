"""The checks of `dynamo_core.testing.admission_kit`, by promise."""
