"""What the commands read from and say to a person: prompts in, text, statistics and JSON out."""
