"""What is kept of spans, and how long their end may take."""

QUEUED = 2048  # spans that wait; the SDK's default, which OTEL_BSP_MAX_QUEUE_SIZE changes
MAX_VALUE_LENGTH = 1024  # characters of an attribute, beyond which it is cut
FLUSH_SECONDS = 2.0  # when the process ends, for what is left
QUIET_SECONDS = 60.0  # between two lines of the log about a collector that is away
