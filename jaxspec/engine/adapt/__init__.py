"""How many drafts to verify, from recent acceptance and measured step times."""
