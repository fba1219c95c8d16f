"""From names of models to an engine that is ready to run."""
