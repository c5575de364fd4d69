"""Measures what launches take on the lanes that serve, into a profile that estimators are fitted
on. `grid` says what, in which order; `rig` drives the lanes; `measure` times; `run` is the
command."""
