"""The grid of ranks: stages of a pipeline, by ranks with different data, by ranks that share tensor-parallel layers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where each rank lies. Ranks that share layers follow each other, and the stages of a pipeline are the farthest.

    Attributes:
        ranks: The number of all ranks.
        pipeline: The number of ranks of a pipeline.
        tensor: The number of ranks that share tensor-parallel layers.
    """

    ranks: int
    pipeline: int = 1
    tensor: int = 1

    @property
    def data(self) -> int:
        """How many ranks have data that differ."""
        return max(1, self.ranks // (self.pipeline * self.tensor))

    def data_rank(self, rank: int) -> int:
        """The number of a rank's data."""
        return rank // self.tensor % self.data

    def with_same_data(self, rank: int) -> list[int]:
        """The ranks that have the data of this one, which is among them."""
        return [one for one in range(self.ranks) if self.data_rank(one) == self.data_rank(rank)]

    def pipeline_of(self, rank: int) -> list[int]:
        """The ranks of this one's pipeline, in the order of their stages. It is among them."""
        return list(range(rank % self._stride, self.ranks, self._stride))

    def with_other_data(self, rank: int) -> list[int]:
        """The ranks that do what this one does, on other data. It is among them."""
        stage, place = rank // self._stride, rank % self.tensor
        return [one for one in range(self.ranks) if (one // self._stride, one % self.tensor) == (stage, place)]

    def sharing_layers(self, rank: int) -> list[int]:
        """The ranks that share tensor-parallel layers with this one, which is among them."""
        first = rank // self.tensor * self.tensor
        return list(range(first, first + self.tensor))

    def of_stage(self, rank: int) -> list[int]:
        """The ranks that hold the same stages as this one, which is among them."""
        first = rank // self._stride * self._stride
        return list(range(first, first + self._stride))

    @property
    def first_of_data(self) -> list[int]:
        """The first rank with each data."""
        return list(range(0, self._stride, self.tensor))

    @property
    def _stride(self) -> int:
        return self.data * self.tensor
