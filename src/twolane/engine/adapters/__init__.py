"""LoRA adapters as the engine keeps them."""
