"""The wire between vmmd and its clients: gRPC messages and shared pages."""
