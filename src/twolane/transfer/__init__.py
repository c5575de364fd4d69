"""KV pages between two processes of one engine, which both keep every page."""
