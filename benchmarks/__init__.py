"""Load generator, bare probe and suite: what a request and a token cost the process under test. Not installed."""
