"""The live dashboard: its page, its data and the history that it shows."""
