"""Load and what comes of it: the same requests and metrics for an engine in this process and a server elsewhere."""
