"""The virtual device: clock, device model, lanes, machine and profile of the simulator."""
