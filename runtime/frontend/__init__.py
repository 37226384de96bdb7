"""What front ends use: the asynchronous engine and its channel to the controller."""
