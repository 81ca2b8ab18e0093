"""Streams that another server can continue: lines that mark a stream's progress (marked), and
restoring a request's state (replay)."""
