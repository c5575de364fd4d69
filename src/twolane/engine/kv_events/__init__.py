"""What enters and leaves the prefix tree, published for routers that know prefixes."""
