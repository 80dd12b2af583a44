"""The generation pipeline: from a parsed request to the events of an answer, in no API's own shape."""
