"""Trains a small target and its tokenizer from scratch, for the demo pair."""
