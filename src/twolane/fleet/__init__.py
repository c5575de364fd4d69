"""Several replicas behind one address: processes, health checks, routing and the ingress."""
