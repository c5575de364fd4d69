"""The transformer: families, layers, paged attention, weights, tokenizers and sampling."""
