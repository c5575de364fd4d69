"""Reading models: where they come from, their files and their weights."""
