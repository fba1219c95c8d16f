"""The tokenizer, the chat template, and text that is streamed."""
