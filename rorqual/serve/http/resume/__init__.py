"""Streams that another server can go on with: lines that say how far a stream has come (marked),
and bringing a request to where it was (replay)."""
