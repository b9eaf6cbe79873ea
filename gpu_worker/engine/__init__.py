"""The engine: synchronous, in a process of its own. Start reading at api.py (the seam), then engine.py (a step)."""
