"""Chat templates: from messages to the one text that a model was trained on."""
