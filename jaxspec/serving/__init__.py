"""The HTTP server: OpenAI's protocol in front of an engine that has a thread of its own."""
