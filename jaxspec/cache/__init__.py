"""What layers remember of committed tokens, as values: arguments and results, no hidden state."""
