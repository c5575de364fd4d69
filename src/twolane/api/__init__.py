"""The front: OpenAI's HTTP API, text, admission and metrics, in a process of its own.

Nothing in here imports PyTorch; the engine process does.
"""
