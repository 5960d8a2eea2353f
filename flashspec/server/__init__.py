"""An OpenAI-compatible server over an engine; it needs the ``serve`` extra."""
