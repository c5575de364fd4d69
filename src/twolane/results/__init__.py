"""Results of a run: records, metrics, summaries and how they are saved and read."""
