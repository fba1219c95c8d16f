"""Text in, text out: tokenizer, chat template, streaming."""
