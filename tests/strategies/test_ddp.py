"""``ddp_tuned`` is torch's DDP, with the gradients in its buckets."""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import ddp, largest_difference, train


class LookAtWrapper(Callback):
    def __init__(self) -> None:
        self.wrapper: DistributedDataParallel | None = None
        self.shares_memory = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.wrapper = trainer.strategy.model
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self.shares_memory = len(storages) < len(gradients)


def compare_with_ddp(name: str, module: type[zoo.Zoo]) -> tuple[float, bool, bool, bool]:
    look = LookAtWrapper()
    actual = train(lambda: module(), name, callbacks=[look], gradient_clip_val=0.05)
    difference = largest_difference(actual, train(lambda: module(), ddp(), gradient_clip_val=0.05))
    assert isinstance(look.wrapper, DistributedDataParallel)
    return difference, look.wrapper.gradient_as_bucket_view, look.wrapper.find_unused_parameters, look.shares_memory


def test_it_trains_as_ddp_does_to_the_last_bit(pool: RankPool) -> None:
    assert pool.run(2, compare_with_ddp, "ddp_tuned", zoo.MLP) == [(0.0, True, False, True)] * 2


def test_unused_parameters_are_found_by_flag(pool: RankPool) -> None:
    name = "ddp_tuned_find_unused_parameters_true"
    for difference, as_view, finds_unused, _ in pool.run(2, compare_with_ddp, name, zoo.Unused):
        assert difference == 0.0 and as_view and finds_unused
