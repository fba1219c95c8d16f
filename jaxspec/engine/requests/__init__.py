"""One request: what it asks for, how far it is, and what it returns."""
