"""Text to tokens and back: tokenizers, chat templates, detokenizing and stop strings."""
