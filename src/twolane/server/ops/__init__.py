"""Operators' endpoints: health, metrics, traces and the dashboard."""
