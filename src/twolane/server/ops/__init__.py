"""What operators look at: health, metrics, traces and the dashboard."""
