"""Transports that carry the bytes of pages from one engine's memory to another's."""
