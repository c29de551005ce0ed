"""The gRPC server: translates, checks identity, calls the manager; no policy."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log, read at its import, has clients' bytes as they came
