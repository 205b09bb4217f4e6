"""Data loaders of every kind that a training may resume with, each shuffled where it can be."""

import multiprocessing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

SAMPLES, BATCH = 45, 4


class Numbered(Dataset[Tensor]):
    """Each sample is made of its index; how many were loaded in this process is counted."""

    loaded = 0

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int | list[int]) -> Tensor:
        if isinstance(index, list):
            return torch.stack([self[one] for one in index])
        Numbered.loaded += 1
        return torch.cat((torch.tensor([float(index)]), torch.sin(torch.arange(1.0, 8.0) * (index + 1))))


def own_generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch"])
    return context


def loader(samples: int = SAMPLES, **arguments: Any) -> DataLoader[Any]:
    sampled = {"sampler", "batch_sampler", "shuffle"} & arguments.keys()
    defaults = {} if sampled else {"shuffle": True}
    if "batch_sampler" not in arguments:
        defaults["batch_size"] = BATCH
    if arguments.get("num_workers"):
        defaults["multiprocessing_context"] = forking()
    return DataLoader(Numbered(samples), **{**defaults, **arguments})


class BySize(Sampler[list[int]]):
    """Batches of different sizes, in an order drawn anew in each epoch."""

    def __init__(self, sampler: Any, batch_size: int = BATCH, drop_last: bool = False) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        indices, sizes = iter(self.sampler), self._sizes()
        for place in torch.randperm(len(sizes)).tolist():
            yield [next(indices) for _ in range(sizes[place])]

    def _sizes(self) -> list[int]:
        found: list[int] = []
        while (left := len(self.sampler) - sum(found)) > 0:
            found.append(min(1 + len(found) % 5, left))
        return found

    def __len__(self) -> int:
        return len(self._sizes())


class Unknown(Sampler[int]):
    """A user's own: draws one index at a time, from a generator of its own."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.generator = samples, own_generator(5)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.samples):
            yield int(torch.randint(self.samples, (), generator=self.generator))

    def __len__(self) -> int:
        return self.samples


class Unsized(Unknown):
    def __len__(self) -> int:
        raise TypeError


class Permuted(Sampler[Any]):
    """A user's own: yields numbers of NumPy."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(SAMPLES).numpy())

    def __len__(self) -> int:
        return SAMPLES


class LastFirst(DistributedSampler[Any]):
    """A user's own, which shares one order among the ranks, as torch's does."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[::-1])


class StatefulLoader(DataLoader[Tensor]):
    """Knows its place by itself, another one on each rank."""

    yielded = resume_at = 0

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        self.yielded, self.resume_at = self.resume_at, 0
        # From elsewhere on each rank.
        for batch in islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.yielded * 10 + dist.get_rank()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["place"] % 10 == dist.get_rank()
        self.resume_at = state["place"] // 10


class WithoutLength(StatefulLoader):
    def __len__(self) -> int:
        raise TypeError


class Dealt:
    """Knows its place by itself; deals its samples anew in each pass and adds noise, both drawn in this process."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.place, self.seed = samples, 0, 0
        self.loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        loaded, self.loaded = self.loaded, None
        self.place = 0 if loaded is None else loaded["place"]
        self.seed = int(torch.randint(2**40, ())) if loaded is None else loaded["seed"]
        order = torch.randperm(self.samples, generator=own_generator(self.seed)).tolist()
        numbered = Numbered(self.samples)
        while self.place < self.samples:
            batch = numbered[order[self.place : self.place + BATCH]]
            batch[:, 1:] += torch.rand(len(batch), 7)
            self.place += BATCH
            yield batch

    def __len__(self) -> int:
        return -(-self.samples // BATCH)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


class Endless:
    """A stream, which continues where an epoch has ended it."""

    place = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.place += 1
            yield Numbered()[[self.place]]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


ZERO1, TUNED = KINDS = ("ZeRO1Strategy", "TunedDDPStrategy")
BATCHES = ("on_train_batch_start", "on_train_batch_end")
STEPS = ("on_before_backward", "on_before_optimizer_step")
START = "on_train_start"
BEGINS = (START, "on_train_epoch_start")
ENDS = ("on_validation_end", "on_train_epoch_end")


class Row(NamedTuple):
    """A training on one kind of loader.

    Attributes:
        make: Makes the loader, on each rank, shuffled where it can be.
        arguments: The Trainer's.
        from_module: Whether the module makes it, in its hook.
        kind: Of strategy. Where loaders stand has nothing to do with it: each row has one.
        strategy: Its arguments.
        width: Of the module.
        hooks: In which it is saved.
        after: After how many batches in hooks of a batch.
        validates_too: Whether validations have the same loader.
    """

    make: Callable[[], Any]
    arguments: Mapping[str, Any] = MappingProxyType({})
    from_module: bool = False
    kind: str = ZERO1
    strategy: Mapping[str, Any] = MappingProxyType({})
    width: int = 24
    hooks: tuple[str, ...] = BATCHES[1:]
    after: Collection[int] = ()
    validates_too: bool = False


OWN = {"use_distributed_sampler": False}


def cycled() -> CombinedLoader:
    return CombinedLoader({"long": loader(), "short": loader(13)}, "max_size_cycle")


def stateful(samples: int = SAMPLES, kind: type[StatefulLoader] = StatefulLoader) -> StatefulLoader:
    return kind(Numbered(samples), batch_size=BATCH, generator=own_generator())


without_length = partial(stateful, kind=WithoutLength)


def uneven(samples: int, more: int, **arguments: Any) -> DataLoader[Any]:
    return loader(samples + more * dist.get_rank(), **arguments)


SAMPLERS: dict[str, Row] = {
    "shuffled": Row(loader),
    "sequential": Row(lambda: loader(shuffle=False)),
    "by one": Row(lambda: loader(batch_size=None)),
    "workers": Row(lambda: loader(num_workers=2)),
    "persistent": Row(lambda: loader(num_workers=1, persistent_workers=True, prefetch_factor=4)),
    "weighted": Row(lambda: loader(sampler=WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES))),
    "random own": Row(lambda: loader(), OWN),
    "random own, generator": Row(lambda: loader(generator=own_generator()), OWN),
    "generator, workers": Row(lambda: loader(generator=own_generator(), num_workers=1), OWN),
    "with replacement": Row(lambda: loader(sampler=RandomSampler(range(SAMPLES), True, 70, own_generator())), OWN),
    "subset": Row(lambda: loader(sampler=SubsetRandomSampler(range(3, SAMPLES), own_generator())), OWN),
    "user's distributed": Row(lambda: loader(sampler=DistributedSampler(range(SAMPLES), seed=7))),
    "a subclass of it": Row(lambda: loader(sampler=LastFirst(range(SAMPLES), seed=7), num_workers=1)),
    "unknown": Row(lambda: loader(sampler=Unknown()), OWN),
    "unknown, workers": Row(lambda: loader(sampler=Unknown(), num_workers=1)),
    "unknown, no length": Row(lambda: loader(sampler=Unsized()), OWN),
    "numbers of NumPy": Row(lambda: loader(sampler=Permuted()), OWN),
    "batch sampler": Row(lambda: loader(batch_sampler=BySize(RandomSampler(range(SAMPLES)))), OWN),
    "batch sampler, injected": Row(lambda: loader(batch_sampler=BySize(RandomSampler(range(SAMPLES))))),
    "batches as samples": Row(
        lambda: loader(sampler=BatchSampler(RandomSampler(range(SAMPLES)), 3, False), batch_size=None), OWN
    ),
}
TOGETHER: dict[str, Row] = {
    "two": Row(lambda: [loader(), loader(29)]),
    "min_size": Row(lambda: CombinedLoader([loader(), loader(29, num_workers=1)], "min_size")),
    "max_size": Row(lambda: CombinedLoader([loader(), loader(13)], "max_size")),
    "max_size_cycle": Row(cycled),
    "cycle own": Row(cycled, OWN),
    "no lengths": Row(lambda: [loader(13), loader(sampler=Unsized()), loader(sampler=Unsized(21))], OWN),
    "no length first": Row(lambda: CombinedLoader([loader(sampler=Unsized(17)), loader()], "min_size"), OWN),
    "uneven": Row(lambda: uneven(SAMPLES, 10), OWN),
    "uneven, no lengths": Row(lambda: loader(sampler=Unsized(30 + 9 * dist.get_rank())), OWN),
    "uneven, cycled": Row(lambda: [uneven(SAMPLES, 10), uneven(9, 4, num_workers=1)], OWN),
}
ARGUMENTS: dict[str, Row] = {
    "limited": Row(loader, {"limit_train_batches": 5}),
    "limited, cycled": Row(cycled, {**OWN, "limit_train_batches": 5}),
    "validated": Row(loader, {"val_check_interval": 2}),
    "validated across epochs": Row(loader, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
    "accumulated": Row(loader, {"accumulate_grad_batches": 2}),
    "accumulated own": Row(
        loader, {**OWN, "accumulate_grad_batches": 3}, strategy={"shard_gradients": True, "expose_gradients": False}
    ),
    "reloaded": Row(loader, {"reload_dataloaders_every_n_epochs": 1}, from_module=True),
    "reloaded own": Row(loader, {**OWN, "reload_dataloaders_every_n_epochs": 1}, from_module=True),
    "overfitted": Row(loader, {"overfit_batches": 3}),
    "from the module": Row(cycled, from_module=True),
    "by steps": Row(loader, {"max_steps": 13, "max_epochs": -1}),
}
STATEFUL: dict[str, Row] = {
    "stateful": Row(stateful, OWN),
    "draws": Row(Dealt, OWN),
    "draws, accumulated": Row(Dealt, {**OWN, "accumulate_grad_batches": 3}),
    "stateful, cycled": Row(lambda: [loader(), Dealt(13)], OWN),
    "stateful, uneven": Row(lambda: stateful(SAMPLES + 10 * dist.get_rank()), OWN),
    "stateful, max_size": Row(lambda: CombinedLoader([stateful(), stateful(13)], "max_size"), OWN),
    "no length": Row(without_length, OWN),
    "no length, accumulated": Row(without_length, {**OWN, "accumulate_grad_batches": 3}),
    "no length, uneven": Row(lambda: without_length(SAMPLES + 10 * dist.get_rank()), OWN),
    "no length, distributed": Row(
        lambda: WithoutLength(Numbered(), BATCH, sampler=DistributedSampler(range(SAMPLES)), generator=own_generator())
    ),
    "no lengths, cycled": Row(lambda: [without_length(10), stateful(9), without_length(30), loader(21)], OWN),
    "no length first, loader": Row(lambda: CombinedLoader([without_length(17), loader()], "min_size"), OWN),
    "no length first, workers": Row(
        lambda: CombinedLoader([without_length(17), loader(num_workers=1)], "min_size"), OWN
    ),
    "no lengths, max_size": Row(
        lambda: CombinedLoader([without_length(14), without_length(30), stateful(7)], "max_size"), OWN
    ),
}


def in_hooks(
    make: Callable[[], Any],
    hooks: tuple[str, ...],
    arguments: Mapping[str, Any] = MappingProxyType({}),
    kind: str = ZERO1,
    strategy: Mapping[str, Any] = MappingProxyType({}),
    width: int = 24,
) -> Row:
    """Three validated epochs of five batches, mostly, saved in many hooks."""
    arguments = {**OWN, "max_epochs": 3, "val_check_interval": 1.0, **arguments}
    return Row(make, arguments, False, kind, strategy, width, hooks, (0, 4, 5, 8))


shuffled, dealt = partial(loader, 20), partial(Dealt, 20)


def generated(**arguments: Any) -> DataLoader[Any]:
    return shuffled(generator=own_generator(), **arguments)


def unsized() -> DataLoader[Any]:
    return loader(sampler=Unsized(20))


SHARDED = {"state_dict_type": "sharded"}
ASYNC = {**SHARDED, "async_save": True}
BY_TWO = {"accumulate_grad_batches": 2}
QUICK: dict[str, Row] = {
    "ends": in_hooks(shuffled, ENDS, {"use_distributed_sampler": True}, ZERO1, SHARDED),
    "ends, generator": in_hooks(generated, (*ENDS, BATCHES[1]), {}, TUNED),
    "in batches, draws": in_hooks(dealt, (*BATCHES, *STEPS)),
    "ends, stateful": in_hooks(lambda: stateful(20), (ENDS[1], BATCHES[1]), {}, ZERO1, ASYNC),
}
HOOKS: dict[str, Row] = {
    "any hook": in_hooks(shuffled, (*BEGINS, *ENDS, *BATCHES), {}, TUNED, SHARDED),
    "any hook, by steps": in_hooks(shuffled, (*BEGINS, *ENDS, *BATCHES), {"max_steps": 15, "max_epochs": -1}),
    "every other epoch": in_hooks(shuffled, (*ENDS, *BATCHES), {"check_val_every_n_epoch": 2}),
    "twice an epoch": in_hooks(shuffled, (*ENDS, *BATCHES), {"val_check_interval": 2}, TUNED),
    "in windows": in_hooks(shuffled, (*BEGINS, *ENDS, BATCHES[1]), BY_TWO, ZERO1, {"shard_gradients": True}),
    "validated in windows": in_hooks(shuffled, (ENDS[0], *BATCHES), {**BY_TWO, "val_check_interval": 2}, TUNED),
    "one loader": in_hooks(shuffled, (*ENDS, *BATCHES), {"val_check_interval": 2})._replace(validates_too=True),
    "ends, workers": in_hooks(lambda: shuffled(num_workers=1), ENDS),
    "ends, workers, generator": in_hooks(lambda: generated(num_workers=1), ENDS, {}, TUNED),
    "ends, persistent": in_hooks(lambda: shuffled(num_workers=1, persistent_workers=True), ENDS),
}
UNSIZED: dict[str, Row] = {
    "any hook, no length": in_hooks(unsized, (*BEGINS, *ENDS, *BATCHES)),
    "in windows, no length": in_hooks(unsized, BATCHES, BY_TWO, TUNED),
}
STATEFUL_HOOKS: dict[str, Row] = {
    "any hook, stateful": in_hooks(lambda: stateful(20), (*BEGINS, *ENDS, *BATCHES), {}, TUNED),
    "ends, draws, limited": in_hooks(dealt, (*ENDS, BATCHES[1]), {"limit_train_batches": 3}),
    "any hook, a stream": in_hooks(Endless, (*BEGINS, *ENDS, *BATCHES), {"limit_train_batches": 5}),
    "in batches, draws beside": in_hooks(lambda: [shuffled(), Dealt(9)], BATCHES, {}, ZERO1, SHARDED),
    "in windows, draws": in_hooks(dealt, (*BATCHES, STEPS[0]), BY_TWO, TUNED),
    "validated, draws": in_hooks(dealt, (ENDS[0], *BATCHES), {"val_check_interval": 2}),
    "any hook, stateful, no length": in_hooks(
        lambda: without_length(20), (*BEGINS, *ENDS, *BATCHES, *STEPS), {}, TUNED
    ),
    "in batches, no length beside": in_hooks(lambda: [generated(), stateful(5), without_length(9)], BATCHES),
}
ONCE = {"max_epochs": 1}
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": 0.1}
# More than two numbers are summed in an order that the buckets decide; in one so large, Gloo divides the sum.
THREE: dict[str, Row] = {
    "three ranks": in_hooks(lambda: stateful(36), BATCHES[1:], ONCE, TUNED, UNUSED, 4000),
}
QUICK = {name: row._replace(after=(1, 5)) for name, row in QUICK.items()}
# Under DDP ranks with different numbers of batches wait for each other forever. All batches of rows alike are too many:
# two, of each row others.
ROWS = {
    name: row._replace(
        kind=ZERO1 if "uneven" in name or row.strategy else KINDS[number % 2], after=(1 + number % 6, 8 + number % 11)
    )
    for number, (name, row) in enumerate({**SAMPLERS, **TOGETHER, **ARGUMENTS, **STATEFUL}.items())
}
ROWS |= {**QUICK, **HOOKS, **UNSIZED, **STATEFUL_HOOKS, **THREE}
