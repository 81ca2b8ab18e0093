"""A server of ours beside another engine's, under the same load on the same machine."""
