"""The HTTP and gRPC servers of one process."""
