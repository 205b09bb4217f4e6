"""Whether buckets fit the order in which a backward makes gradients."""

from collections.abc import Sequence

WORTH_NEW_BUCKETS = 0.05
"""The share of a backward for which gradients wait in vain, on average, from which on buckets are made anew."""


def share_waited(buckets: Sequence[Sequence[tuple[int, int]]]) -> float:
    """How long gradients wait for others that have to leave first, as a share of the backward.

    Gradients are taken to need time by their size. A bucket leaves when all of its gradients are there and all buckets
    before it have left. The time in which a bucket fills in the best order does not count.

    Args:
        buckets: In the order in which they leave, for each gradient its position in the order in which backward makes
            them, and its bytes.

    Returns:
        The mean over bytes: about 0 in the best order, about 0.5 if everything waits for the last gradient.
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
