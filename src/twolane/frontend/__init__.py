"""Everything of the API process that is not HTTP: the engine's client, generations and text.

Nothing in here imports PyTorch; the engine process does.
"""
