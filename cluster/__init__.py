"""Places the parts and starts them: executors put together, the command line, and (lazily) Ray."""
