"""Everything that talks to other ranks: the only importer of ``torch.distributed``. Knows nothing of Lightning.

One training step, in the order of the files that carry it: the loss is weighed (``weights.py``); a gradient is ready
(``reducer.py``), its bucket is packed (``buckets.py``) and reduce-scattered (``reductions.py``, ``collectives.py``, by
``backends.py`` or between CPUs by ``exchange.py`` and ``two_level.py``);
the norm of the shards is taken (``clipping.py``); this rank's shards are stepped bucket by bucket (``sharding.py``,
called by ``optimizer.py``) and sent home (``gatherer.py``); who reads a parameter before it is there waits
(``read_guard.py``). Once, after two steps, buckets are planned anew (``replanning.py``) and what is in them moves
(``redistribution.py``).
"""
