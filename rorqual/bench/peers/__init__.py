"""Our server compared with another engine's, under the same load on the same machine."""
