"""Ranks with equally much to do: where an engine's experts lie at first, and how they move."""
