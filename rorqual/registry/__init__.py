"""Servers known through etcd, where there are several routers: who writes there, who reads, and
what proves that a server may join."""
