"""The Anthropic API: messages, and how many tokens one has."""
