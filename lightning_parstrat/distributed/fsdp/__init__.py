"""Modules sharded by torch's FSDP2: which are gathered together, gradients of unused parameters, whole states."""
