"""How commands talk to a person: flags and prompts in; text, statistics and JSON out."""
