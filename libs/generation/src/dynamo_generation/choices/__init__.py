"""One choice of an answer: text, reasoning, tool calls, scores."""
