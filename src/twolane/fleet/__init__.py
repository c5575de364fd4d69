"""Several replicas behind one address: their processes, their watch, the router, the ingress."""
