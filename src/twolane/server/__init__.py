"""The HTTP server: OpenAI's and Anthropic's endpoints, admission, metrics and the dashboard.

Nothing in here imports PyTorch; the engine process does.
"""
