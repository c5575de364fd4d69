"""The real engine on virtual GPUs.

`run.py` is the command. The event loop is `SimLanes.advance` in `lanes.py`; `device.py` says how
long its steps take, from `operators.py` and the data sheets in `gpus.py`; `machine.py` and
`port.py` are what the engine is given instead of a GPU and a process; `profile.py` measures.
"""
