"""One choice of an answer: text, reasoning, calls of tools, scores."""
