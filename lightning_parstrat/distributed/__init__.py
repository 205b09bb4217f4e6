"""Everything that talks to other ranks: the only importer of ``torch.distributed``. Knows nothing of Lightning.

Rooms, each of which may import those before it: ``comm/`` (process groups and what travels by them), then ``zero1/``
(the engine of ``zero1_custom``) and ``ddp/`` (what only ``ddp_tuned`` needs), then ``gradients/`` (clipping, weights,
non-finite gradients) and ``checkpoint/`` (sharded checkpoints). One training step through them: docs/architecture.md.
"""
