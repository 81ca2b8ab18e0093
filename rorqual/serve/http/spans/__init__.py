"""Spans of requests for an OpenTelemetry collector; profiles of steps are in tracing/."""
