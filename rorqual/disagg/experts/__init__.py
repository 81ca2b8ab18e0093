"""Expert servers: the side that holds experts and computes for callers (parallel/remote)."""
