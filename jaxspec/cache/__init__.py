"""Keys and values in pages, as values: pools are arguments and results, never hidden state."""
