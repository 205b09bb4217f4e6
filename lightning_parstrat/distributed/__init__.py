"""Everything that talks to other ranks: the only importer of ``torch.distributed``. Knows nothing of Lightning.

One training step, in the order of the files that carry it: a gradient is ready (``reducer.py``), its bucket is packed
(``buckets.py``) and reduce-scattered (``collectives.py``); the norm of the shards is taken (``clipping.py``); this
rank's shard is stepped (``sharding.py``, called by ``optimizer.py``); the updated parameters come home
(``gatherer.py``).
"""
