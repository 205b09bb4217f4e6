"""Everything that talks to other ranks: the only importer of ``torch.distributed``. Knows nothing of Lightning.

Subpackages, in order. Each may import the earlier ones. ``comm/`` has process groups and transfers. ``engine/`` is the
engine of ``zero1_custom``. ``ddp/`` has the parts that only ``ddp_tuned`` needs. ``gradients/`` has clipping, weights
and non-finite gradients. ``checkpoint/`` has sharded checkpoints. One training step through them: docs/architecture.md.
"""
