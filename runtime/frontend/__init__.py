"""What the HTTP and gRPC servers share: the asynchronous engine and its channel to the controller."""
