"""Qwen3, Qwen3.5 and their drafters as pure functions of parameters, inputs and caches."""
