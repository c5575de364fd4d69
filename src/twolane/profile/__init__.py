"""Measures the seconds of launches on the lanes that serve, into a profile that estimators are
fitted on. `grid` plans the points, `rig` drives the lanes, `measure` times, and `run` is the
command."""
