"""The steps that run on the device, as pure functions, with their inputs and results."""
