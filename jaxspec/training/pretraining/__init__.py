"""Training a small target and its tokenizer from nothing, for the demo pair."""
