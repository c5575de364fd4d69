"""Predictions of how long a launch takes on a number of units, alone or beside the other lane."""
