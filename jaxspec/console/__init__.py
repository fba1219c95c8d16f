"""The input and output of commands: flags and prompts in; text, statistics and JSON out."""
