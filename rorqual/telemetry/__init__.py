"""Spans of requests, exported to an OpenTelemetry collector: one trace over router and servers. Not
the profiles of steps (serve/http/tracing)."""
