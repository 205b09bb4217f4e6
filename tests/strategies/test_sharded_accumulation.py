"""``zero2_custom`` in trainings: who has it keep whole gradients between micro-batches."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import Looks, largest_difference, train, zero1
from tests.strategies.test_report import listening


class Undoes(zoo.MLP):
    """Takes back what a micro-batch has added to the gradients where it does not like its loss."""

    def on_after_backward(self) -> None:
        index = self.trainer.fit_loop.epoch_loop.batch_idx
        gradients = [parameter.grad for parameter in self.parameters()]
        if index % 4 == 1:
            for gradient, kept in zip(gradients, self.kept, strict=True):
                gradient.copy_(kept)
        self.kept = [gradient.clone() for gradient in gradients]


class Clears(zoo.MLP):
    """Forgets what has been accumulated, of the module's parameters."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 5 == 2:
            self.zero_grad()
        return super().training_step(batch, batch_idx)


class HalvesAsItComes(zoo.MLP):
    """A hook of a parameter changes what has been accumulated so far."""

    def on_train_start(self) -> None:
        self.net[0].weight.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)


class ValidationForgets(zoo.MLP):
    def on_validation_start(self) -> None:
        self.zero_grad()


WHOLE = {
    Undoes: "Undoes.on_after_backward",
    Clears: "Clears.training_step",
    HalvesAsItComes: "hooks of parameters",
    ValidationForgets: "ValidationForgets.on_validation_start",
}


def compare_watched(module: type[zoo.Zoo]) -> tuple[float, list[str]]:
    runs, said = [], []
    for in_shards in (False, True):
        chosen = zero1(expose_gradients="auto", partial_window="exact", shard_gradients=in_shards)
        with listening() as lines:
            runs.append(
                train(module, chosen, validate=True, accumulate_grad_batches=3, val_check_interval=5, max_epochs=2)
            )
        said = [line for line in lines if "between micro-batches" in line]
    return largest_difference(*runs), said


def test_who_looks_at_what_has_accumulated_finds_it_whole_and_is_told_once(pool: RankPool) -> None:
    for module in (*WHOLE, zoo.MLP):
        first, *others = pool.run(2, compare_watched, module)
        named = WHOLE.get(module)
        assert len(first[1]) == (named is not None) and all(lines == [] for _, lines in others)
        assert named is None or (first[1][0].startswith("zero2_custom: ") and named in first[1][0])
        for apart, _ in (first, *others):
            # To the last bit, where whole gradients accumulate alike.
            assert apart <= (2e-5 if named is None else 0)
    ((apart, said),) = pool.run(1, compare_watched, zoo.MLP)
    assert apart == 0 and said == []


class LooksOnOneRank(Callback):
    """Reads gradients on rank 1 alone."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.norms = [parameter.grad.norm() for parameter in pl_module.parameters()]


def watched_by_one() -> bool:
    chosen = zero1(expose_gradients="auto", shard_gradients=True)
    callbacks: list[Callback] = [LooksOnOneRank()] if dist.get_rank() == 1 else []
    looks = Looks(lambda trainer: trainer.strategy._engine.reducer.shards_accumulation)
    train(zoo.MLP, chosen, callbacks=[*callbacks, looks], accumulate_grad_batches=2)
    return looks.seen


def test_ranks_decide_together(pool: RankPool) -> None:
    assert pool.run(2, watched_by_one) == [False, False]
