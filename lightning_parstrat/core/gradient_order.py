"""Whether buckets fit the order in which a backward makes gradients."""

from collections.abc import Sequence

WORTH_NEW_BUCKETS = 0.05
"""Buckets are rebuilt from this share on: the part of a backward for which gradients wait in vain, on average."""


def share_waited(buckets: Sequence[Sequence[tuple[int, int]]]) -> float:
    """How long gradients wait for others that have to be sent first, as a share of the backward.

    The time that a gradient takes is assumed to be proportional to its size. A bucket is sent when all its gradients
    are ready and all earlier buckets are sent. The time in which a bucket fills in the best order does not count.

    Args:
        buckets: Buckets in the order in which they are sent. Each gradient is its position in the order of backward,
            and its bytes.

    Returns:
        The mean over bytes. It is about 0 in the best order, and about 0.5 if everything waits for the last gradient.
    """
    made = sorted(one for bucket in buckets for one in bucket)
    total = sum(size for _, size in made) or 1
    ready: dict[int, int] = {}
    passed = 0
    for position, size in made:
        passed += size
        ready[position] = passed
    left, waited = 0, 0.0
    for bucket in buckets:
        left = max([left, *(ready[position] for position, _ in bucket)])
        waited += sum(size * (left - ready[position]) for position, size in bucket)
        waited -= sum(size for _, size in bucket) ** 2 / 2
    return waited / total**2
