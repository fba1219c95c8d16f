"""Qwen3 and the DFlash drafter as pure functions of parameters, inputs and key-value pools."""
