"""The gRPC server: translates, checks identity, calls the manager; no policy."""
