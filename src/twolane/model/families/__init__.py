"""The families of models that are served, each in a file of its own. No torch."""
