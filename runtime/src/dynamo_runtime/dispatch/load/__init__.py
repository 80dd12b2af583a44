"""The load of every worker, as far as frontends know it."""
