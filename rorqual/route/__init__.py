"""`rorqual route`: one address before several servers. Chooses a server for each request, tries
elsewhere what one could not take, goes on elsewhere with streams whose server dies, and has prompts
computed by prefill servers where there are such."""
