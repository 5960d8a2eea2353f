"""The same configuration on vLLM: its command, its process, its metrics."""
