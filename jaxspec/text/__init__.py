"""The tokenizer, the chat template, and streamed text."""
