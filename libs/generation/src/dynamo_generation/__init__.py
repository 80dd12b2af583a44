"""The way from a parsed request to the events of an answer, which every API shares and words in its own shape."""
