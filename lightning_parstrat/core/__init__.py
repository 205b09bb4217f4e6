"""Pure algorithms: no communication, no Lightning, no I/O."""
