"""Everything sharded by torch's FSDP2: which modules travel together, gradients of what was not used, whole states."""
