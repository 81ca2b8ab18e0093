"""`rorqual route`: one address for several servers. Chooses a server for each request, retries
failed requests on another, continues streams of a dead server on another, and sends prompts to
prefill servers where there are any."""
