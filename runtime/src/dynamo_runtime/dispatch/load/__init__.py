"""What every worker is doing, as far as frontends know it."""
