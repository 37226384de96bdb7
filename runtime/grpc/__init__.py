"""The gRPC server: `service` implements the methods, `servicer` serves them on grpc.aio."""
