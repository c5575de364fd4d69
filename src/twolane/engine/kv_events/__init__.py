"""Events of the prefix tree, published for prefix-aware routers."""
