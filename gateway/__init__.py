"""The front door: the public API, prompts, limits, and the relay between clients and workers."""
