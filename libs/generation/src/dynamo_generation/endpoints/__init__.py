"""Routes that ask a model, whatever API they speak."""
