"""Caches that travel between engines: prompts computed by one, answers by another."""
