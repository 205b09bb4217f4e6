"""The cost of an optimizer's update of one parameter, if it grows with more than the number of elements.

These costs distribute uncut parameters over the ranks. If one rank owned all large matrices, the other ranks would wait
in every step.
"""

from collections.abc import Sequence

_ELEMENTWISE_WORK = 10
"""Operations per element for momentum, weight decay and the update itself. A matrix product has many more."""


def elementwise(numel: int) -> float:
    """Operations of an update whose cost is proportional to the parameter's elements."""
    return float(_ELEMENTWISE_WORK * numel)


def newton_schulz(shape: Sequence[int], steps: int) -> float:
    """Operations of one orthogonalised update of a matrix, as Muon makes it.

    Each of the ``steps`` iterations makes three products, with an m x n matrix (m <= n). The matrix is multiplied with
    its transpose, the m x m product with itself, and the result with the matrix. These are ``2 m^2 n + 2 m^3 + 2 m^2
    n`` operations. Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), section "Runtime
    analysis".

    Args:
        shape: The parameter's shape. All dimensions after the first count as one. torch's Muon accepts no others.
        steps: Iterations per update.

    Returns:
        The number of floating point operations.
    """
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    # Muon transposes tall matrices, so that the square product is always that of the shorter side.
    short, long = min(rows, columns), max(rows, columns)
    return steps * (4 * short**2 * long + 2 * short**3) + elementwise(rows * columns)
