"""Qwen3 and its drafters as pure functions of parameters, inputs and key-value pools."""
