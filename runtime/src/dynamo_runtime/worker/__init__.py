"""The way in: an engine with a life in discovery, a limit on what it takes, and streams that keep their promises."""
