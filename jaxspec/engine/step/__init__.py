"""The steps that run on the device, as pure functions, with what they take and give."""
