"""Lanes: ordered queues of device work, each bound to a share of the units."""
