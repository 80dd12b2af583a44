"""HTTP listeners of this process and what every one of them serves: limits, error bodies, health, metrics."""
