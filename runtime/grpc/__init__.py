"""The gRPC face: `answering` knows the interface and no server, `servicer` puts it on grpc.aio."""
