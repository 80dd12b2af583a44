"""The contents of answers: tokens, log-probabilities, embeddings and scores, all pure functions of a seed."""
