"""The table of trainings whose parameters and losses must equal the oracle's: a case is a line.

``ways.py`` says in which ways they are trained, and ``test_parity.py`` trains them.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from tests import devices
from tests.strategies import for_shards, odd, odd_optimizers, zoo

FP32, FP64 = 2e-5, 1e-9
# Kernels that a compiler makes sum in another order.
COMPILED = 1e-4
EQUAL = "equal"


class Case(NamedTuple):
    """A training, and what each strategy makes of it.

    Attributes:
        module: Makes the module, given what makes its optimizer.
        optimizer: Makes that, given parameters.
        trainer: Arguments of the Trainer.
        oracle: ``"whole batch"`` is a single process on the batches of all ranks, ``"ddp"`` is stock DDP.
        tolerance: How far parameters may be from the oracle's, relative to the largest of a tensor; losses ten times.
        world_sizes: Of those that are tried.
        strategy: Arguments of ``zero1_custom`` and ``zero2_custom``.
        of_zero3: Arguments of ``zero3_custom``. None for one of several sets.
        zero1, zero2, zero3, ddp_tuned: ``EQUAL``, or a part of the error that all ranks must raise, or None where the
            training is not tried.
        units: Whether all ranks call the same modules; else ``zero3_custom`` may gather only the whole at once.
        needs: A package that machines with a device may lack, or a CPU's random numbers; not tried on a device.
    """

    module: Callable[[zoo.OptimizerFactory], Any]
    optimizer: Callable[..., Optimizer] = zoo.adamw
    trainer: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    oracle: str = "whole batch"
    tolerance: float = FP32
    world_sizes: tuple[int, ...] = (1, 2, 3)
    strategy: dict[str, Any] = {}  # noqa: RUF012
    of_zero3: dict[str, Any] | None = None
    zero1: str | None = EQUAL
    zero2: str | None = EQUAL
    zero3: str | None = EQUAL
    ddp_tuned: str | None = EQUAL
    units: bool = True
    needs: str = ""


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
plain_sgd = partial(torch.optim.SGD, lr=0.05)
adagrad = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1)
amsgrad = partial(torch.optim.Adam, lr=1e-2, eps=1e-4, amsgrad=True)
foreach = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True)
fused = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True)
rmsprop = partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.5, centered=True)
adafactor = partial(torch.optim.Adafactor, lr=1e-2)
muon = partial(torch.optim.Muon, lr=0.02)
lbfgs = partial(torch.optim.LBFGS, lr=0.5, max_iter=3)
# Looks at the loss to find out how far to go, and evaluates it as often as that takes.
searching = partial(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")


def capturable(parameters: Any) -> Optimizer:
    """A rate that lies on the device, as it must where steps are captured."""
    rate = torch.tensor(1e-2, device=devices.device())
    return torch.optim.AdamW(parameters, lr=rate, eps=1e-4, capturable=devices.kind() == "cuda")


def of_others(name: str, **arguments: Any) -> Callable[[Any], Optimizer]:
    """An optimizer of `pytorch_optimizer`, in the mode that it is to train in."""

    def make(parameters: Any) -> Optimizer:
        optimizer = getattr(importlib.import_module("pytorch_optimizer"), name)(list(parameters), **arguments)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    return make


CLIP = {"gradient_clip_val": 0.05}
DOUBLE = {"precision": "64-true"}
EXPOSED = {"expose_gradients": "auto"}
TWICE = {"max_epochs": 2}
MEETING = {"shard_group": 1, "outer_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
"""Groups of one rank whose meetings are steps of SGD by the mean gradient."""
DENSE = "Use `sparse=False`"
MIXED = "mixed torch.Tensor and DTensor"
FORGETS = "torch forgets what is assigned to `data` of a shard"
# The first forward of what is added to ddp_tuned is by each rank's own values.
ADDED: dict[str, Any] = {"zero3": "but was not in the module", "ddp_tuned": None}
DIFFERENT = "The ranks have called different modules in a training step"
ROUNDED = "A parameter of '{}' was written to while it was gathered in bf16"
HELD = "through an object from before the training"
CPU = "numbers that a CPU draws"
NEEDS_CLOSURE = "LBFGS cannot step sharded parameters: its `step` needs a closure"
# Without the flag for unused parameters.
WAITS = "DDP waits for them"
CLIPPED_DOUBLE = {**CLIP, **DOUBLE}


def third_party(optimizer: Callable[..., Optimizer], module: type[zoo.Zoo] = zoo.Convolutional, **more: Any) -> Case:
    """Of a package that not every machine has; zero3_custom has tests of its own for what it steps as a whole."""
    defaults = {"trainer": DOUBLE, "oracle": "ddp", "tolerance": FP64, "world_sizes": (2, 3), "zero3": None}
    return Case(module, optimizer, needs="pytorch_optimizer", **{**defaults, **more})


def by_loss(module: type[zoo.Zoo] = zoo.MLP, **more: Any) -> Case:
    defaults = {"optimizer": lbfgs, "trainer": DOUBLE, "tolerance": FP64, "world_sizes": (2, 3)}
    return Case(module, zero3=NEEDS_CLOSURE, **{**defaults, **more})


def in_16_bits(precision: str, tolerance: float) -> Case:
    """By an optimizer whose step is as large as the gradient: what is wrong with that is more than what is rounded."""
    narrow = {"trainer": {"precision": precision}, "strategy": {"master_weights": False}}
    return Case(zoo.MLP, sgd, oracle="ddp", tolerance=tolerance, world_sizes=(2, 3), **narrow)


NOT_GATHERED = "a block of `zero3_custom` whose parameters were not gathered"
ROOT, UNITS = {"min_num_params": 10**9}, {"min_num_params": 0}
"""All parameters are gathered for a whole step; or those of blocks by themselves."""
STAY, ONE_BY_ONE = {"reshard_after_forward": False}, {"auto_wrap_policy": ["Linear"]}
AUTOCAST, WINDOW = {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}
WHOLE = {"shard_gradients": False}


def of_shards(module: Any, of_zero3: dict[str, Any] | None = None, zero3: str = EQUAL, **more: Any) -> Case:
    """What only shards could get wrong, or cannot do."""
    others = dict.fromkeys(("zero1", "zero2", "ddp_tuned"))
    defaults = {"oracle": "ddp", "world_sizes": (2, 3) if zero3 == EQUAL else (2,)}
    return Case(module, of_zero3={} if of_zero3 is None else of_zero3, zero3=zero3, **{**defaults, **others, **more})


CASES = {
    # Ten kinds of modules, by a single process on the whole batch.
    "mlp": Case(zoo.MLP),
    "convolutional": Case(zoo.Convolutional),
    "tied": Case(zoo.TiedLanguageModel),
    "attention": Case(zoo.Attention),
    "recurrent": Case(zoo.Recurrent),
    "unused": Case(zoo.Unused, ddp_tuned=WAITS),
    "unused in the only step": Case(zoo.Unused, trainer={"limit_train_batches": 1}, ddp_tuned=WAITS),
    "frozen": Case(zoo.Frozen),
    "a frozen teacher": Case(zoo.Distilled, world_sizes=(2,)),
    "bare parameters": Case(zoo.BareParameters),
    "scheduled, single precision": Case(zoo.ScheduledTransformer, oracle="ddp"),
    "complex": Case(zoo.Complex),
    # Whose result depends on how the batch is split: by DDP.
    "unused by some ranks": Case(
        zoo.UnusedBySomeRanks, trainer=DOUBLE, oracle="ddp", tolerance=FP64, units=False, ddp_tuned=WAITS
    ),
    "batch norm": Case(zoo.BatchNormalised, trainer={"max_epochs": 2}, oracle="ddp"),
    "gan": Case(zoo.Adversarial, oracle="ddp"),
    # Optimizers.
    "sgd": Case(zoo.MLP, sgd),
    "sgd, unused": Case(zoo.Unused, sgd, ddp_tuned=WAITS),
    "adagrad, whose state exists before the first step": Case(zoo.MLP, adagrad),
    "amsgrad": Case(zoo.Convolutional, amsgrad, world_sizes=(2, 3)),
    "rmsprop": Case(zoo.MLP, rmsprop, world_sizes=(3,)),
    "foreach": Case(zoo.Attention, foreach, world_sizes=(2, 3)),
    "fused": Case(zoo.Attention, fused, world_sizes=(2, 3)),
    "adafactor, which looks at whole matrices": Case(zoo.Convolutional, adafactor, world_sizes=(2, 3)),
    "sparse gradients": Case(
        odd.Sparse, plain_sgd, oracle="ddp", world_sizes=(2,), zero1=DENSE, zero2=DENSE, zero3=DENSE
    ),
    # Clipping and accumulation.
    "clip by norm": Case(zoo.MLP, trainer=CLIP),
    "clip by value": Case(zoo.MLP, trainer={"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}),
    "clip by norm, unused": Case(zoo.Unused, trainer=CLIP, world_sizes=(2, 3), ddp_tuned=WAITS),
    "clip by norm, fewer parameters than ranks": Case(zoo.BareParameters, sgd, trainer=CLIP, world_sizes=(2, 3)),
    "accumulate": Case(zoo.MLP, trainer={"accumulate_grad_batches": 2}, oracle="ddp"),
    "accumulate, short window": Case(
        zoo.TiedLanguageModel, trainer={"accumulate_grad_batches": 3, **CLIP}, oracle="ddp"
    ),
    "accumulate, unused": Case(
        zoo.Unused, trainer={"accumulate_grad_batches": 3}, oracle="ddp", world_sizes=(2, 3), ddp_tuned=WAITS
    ),
    # Precision.
    "double": Case(zoo.ScheduledTransformer, trainer={"precision": "64-true", **CLIP}, tolerance=FP64),
    "bf16 autocast": Case(zoo.MLP, trainer={"precision": "bf16-mixed", **CLIP}, oracle="ddp", world_sizes=(2, 3)),
    "fp16 autocast, a scaler": Case(zoo.MLP, trainer={"fp16": True, **CLIP}, oracle="ddp", tolerance=1e-3),
    "fp16 autocast, a scale so large that steps are skipped": Case(
        zoo.MLP, trainer={"fp16": True, "init_scale": 2.0**24}, oracle="ddp", tolerance=1e-3, world_sizes=(2, 3)
    ),
    # The strategy's own arguments.
    "one bucket": Case(zoo.Attention, strategy={"bucket_cap_mb": 25}, world_sizes=(2, 3)),
    "a bucket for each parameter": Case(zoo.Attention, strategy={"bucket_cap_mb": 1e-6}, world_sizes=(2, 3)),
    "whole parameters": Case(zoo.Convolutional, strategy={"partition": "parameter"}),
    # Parameters of all kinds.
    "memory shared without being tied": Case(odd.SharedMemory, trainer=CLIP, oracle="ddp"),
    "a parameter that cannot train": Case(odd.NeverTrained),
    "a buffer with strides": Case(odd.StridedBuffer, oracle="ddp"),
    "layouts": Case(odd.Layouts, trainer=CLIP),
    "several dtypes": Case(odd.SeveralDtypes, trainer=CLIP),
    "reused under checkpoints": Case(
        odd.ReusedUnderCheckpoints, trainer=CLIP, zero3="use_reentrant=False", ddp_tuned="ready only once"
    ),
    "compiled as a whole": Case(odd.compiled_as_a_whole, trainer=CLIP, world_sizes=(2, 3), tolerance=COMPILED),
    "compiled blocks": Case(odd.CompiledBlocks, trainer=CLIP, oracle="ddp", world_sizes=(2, 3), tolerance=COMPILED),
    "compiled blocks within wrappers": Case(odd.WrappedBlocks, oracle="ddp", world_sizes=(2, 3), tolerance=COMPILED),
    "compiled and checkpointed": Case(
        odd.CompiledAndCheckpointed, trainer=CLIP, world_sizes=(2, 3), tolerance=COMPILED
    ),
    "compiled in the middle": Case(odd.CompilesLater, oracle="ddp", world_sizes=(2, 3), zero3="which is a shard there"),
    # No input of theirs needs gradients, so the blocks get none.
    "reentrant checkpoints": Case(odd.ReentrantCheckpoints, trainer=CLIP, ddp_tuned=WAITS),
    "a rate on the device": Case(zoo.Attention, capturable, trainer=CLIP),
    # The shards of zero3_custom are not what was detached.
    "views are held": Case(odd.HoldsViews, oracle="ddp", zero3=None),
    "parametrized": Case(odd.Parametrized, oracle="ddp", world_sizes=(2, 3)),
    "outside every optimizer": Case(
        odd.OutsideOptimizers, trainer=CLIP, oracle="ddp", strategy=EXPOSED, ddp_tuned=WAITS
    ),
    # Several optimizers, manual optimization.
    "a parameter in two optimizers": Case(odd.SharedParameter, oracle="ddp", strategy=EXPOSED),
    # Weights are read after the backward, when zero3_custom has only shards.
    "repeated backward": Case(odd.RepeatedBackward, oracle="ddp", zero3=MIXED),
    "a backward of an earlier forward": Case(odd.StepsBeforeABackward, oracle="ddp", zero3=None),
    "two heads": Case(odd.TwoHeads, oracle="ddp", strategy=EXPOSED, ddp_tuned=WAITS),
    "two heads, many optimizers look": Case(
        odd.TwoHeads, odd_optimizers.GloballyScaled, oracle="ddp", strategy=EXPOSED, ddp_tuned=WAITS
    ),
    "frozen between backward and step": Case(odd.FrozenBetween, oracle="ddp"),
    "a parameter moves over": Case(odd.MovesOver, oracle="ddp"),
    "state of no parameter": Case(odd.ReloadsState, odd_optimizers.CountsSteps),
    # Under zero3_custom ranks that run a backward more wait for the others.
    "inner backward": Case(odd.InnerBackward, oracle="ddp", zero3=None),
    "inner backward, exposed": Case(odd.InnerBackward, oracle="ddp", strategy={"expose_gradients": True}, zero3=None),
    "zeroes without a choice": Case(zoo.MLP, odd_optimizers.ZeroesWithoutChoice),
    "another optimizer takes over": Case(odd.MoreOptimizers),
    "clip by value, fewer parameters than ranks": Case(
        zoo.BareParameters, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "by closure": Case(odd.ByClosure, oracle="ddp"),
    # DDP does not average its gradients; here they are.
    "backward without a word": Case(odd.Unannounced, strategy=EXPOSED, ddp_tuned=None),
    "backward without a word, a scalar": Case(odd.UnannouncedScalar, strategy=EXPOSED, ddp_tuned=None),
    "two speeds": Case(odd.TwoSpeeds, oracle="ddp", strategy=EXPOSED),
    "gradient penalty": Case(odd.GradientPenalty, oracle="ddp"),
    "gradients before the backward": Case(odd.ByGradientsBefore, oracle="ddp", zero3="in shards were asked for"),
    # DDP reduces the gradients of one.
    "zeroed before the backward": Case(odd.ZeroesBefore, oracle="ddp"),
    "two backwards": Case(odd.TwoBackwards, ddp_tuned=None, zero3="Several backwards have run"),
    "two backwards in a window": Case(
        odd.TwoBackwards, trainer=WINDOW, ddp_tuned=None, zero3="Several backwards have run"
    ),
    "parameters of a class of the user's": Case(odd.OwnClass),
    # Moving targets.
    "toggling": Case(odd.Toggling, trainer=WINDOW),
    "toggling, many buckets": Case(odd.Toggling, trainer=WINDOW, strategy={"bucket_cap_mb": 1e-6}),
    "frozen later": Case(odd.FrozenLater),
    "swapped data": Case(odd.SwappedData, trainer=CLIP, zero3=FORGETS),
    "traded data": Case(odd.TradedData, trainer=CLIP, zero3=FORGETS),
    "changes the optimizer's state": Case(odd.ChangesState),
    "changes the optimizer's state, whole parameters": Case(odd.ChangesState, strategy={"partition": "parameter"}),
    "groups added": Case(odd.GroupsAdded),
    "groups edited in place": Case(odd.GroupsEdited),
    # By another process's numbers: what is added begins with rank 0's.
    "a new head": Case(odd.GetsHead, plain_sgd, trainer=TWICE, **ADDED),
    "a new head, in an old group": Case(odd.GetsHeadInItsGroup, plain_sgd, trainer=TWICE, **ADDED),
    "a new head, many optimizers look": Case(odd.GetsHead, odd_optimizers.GloballyScaled, trainer=TWICE, **ADDED),
    "a new head, in groups that meet": Case(
        odd.GetsHead, plain_sgd, trainer=TWICE, world_sizes=(2,), strategy=MEETING, zero2=None, **ADDED
    ),
    "a layer moves to another optimizer": Case(odd.MovesLayer, oracle="ddp", trainer=TWICE, world_sizes=(2, 3)),
    "a layer joins another optimizer": Case(odd.SharesLayer, oracle="ddp", trainer=TWICE, world_sizes=(2, 3)),
    "schedulers from before and within": Case(odd.Scheduled, oracle="ddp", trainer={"validate": True}),
    "a step within a compiled function": Case(odd.CompilesItsStep, oracle="ddp"),
    "users' hooks": Case(odd.WithHooks, oracle="ddp"),
    # Optimizers that look at whole matrices, or at everything.
    # In double precision: Muon rounds gradients to bf16, where the order of a sum in fp32 may decide.
    "muon": Case(odd.Matrices, muon, oracle="ddp", trainer=DOUBLE, tolerance=FP64),
    "adafactor, clipped": Case(zoo.Convolutional, adafactor, trainer={**DOUBLE, **CLIP}, tolerance=FP64),
    "no torch optimizer": Case(zoo.MLP, odd_optimizers.OddOptimizer, oracle="ddp"),
    "globally scaled": Case(zoo.MLP, odd_optimizers.GloballyScaled, trainer=CLIP),
    "keeps its own list": Case(zoo.Unused, odd_optimizers.KeepsItsOwnList, ddp_tuned=WAITS),
    # Those that evaluate their closure again.
    "lbfgs": by_loss(world_sizes=(1, 2, 3)),
    "lbfgs, line search": by_loss(optimizer=searching, tolerance=1e-7),
    "lbfgs, clipped": by_loss(zoo.Unused, trainer=CLIPPED_DOUBLE, ddp_tuned=WAITS),
    "lbfgs, accumulated": by_loss(trainer={**DOUBLE, **WINDOW}, oracle="ddp", world_sizes=(2,)),
    "closure twice": Case(zoo.MLP, odd_optimizers.ClosureTwice),
    "steps in parts": Case(zoo.MLP, odd_optimizers.StepsInParts),
    "by attribute": Case(odd.Scaled, odd_optimizers.ByAttribute),
    "by class": Case(odd.OnSpheres, odd_optimizers.ByClass),
    "has modes": Case(odd.Averaging, odd_optimizers.HasModes),
    "needs the loss": Case(zoo.MLP, odd_optimizers.NeedsTheLoss),
    "replaced step": Case(zoo.MLP, odd_optimizers.replaced_step),
    "replaced step, a scheduler": Case(zoo.MLP, odd_optimizers.replaced_and_wrapped_step),
    "globally scaled, hidden gan": Case(zoo.Adversarial, odd_optimizers.GloballyScaled, oracle="ddp"),
    "fused, a scaler": Case(zoo.MLP, fused, trainer={"fp16": True}, oracle="ddp", tolerance=1e-3, world_sizes=(2, 3)),
    # Without master weights, as DDP has none.
    "16-true": in_16_bits("16-true", 0.01),
    "bf16-true": in_16_bits("bf16-true", 0.04),
    # Shards: what is held, and written within a step.
    "shards: a backward in a step": of_shards(for_shards.PerturbedByBackward, ROOT),
    "shards: a backward in validation": of_shards(
        for_shards.PerturbedByBackward, ROOT, trainer={"validate": True, "inference_mode": False}
    ),
    "shards: a backward of some inputs": of_shards(for_shards.ByInputs, zero3="in shards were asked for"),
    "shards: unused gradients are allowed": of_shards(for_shards.AllowsUnused, zero3="in shards were asked for"),
    "shards: a penalty on the root": of_shards(for_shards.Penalised, ROOT),
    "shards: graphs are kept": of_shards(for_shards.KeepsGraphs),
    "shards: held weakly": of_shards(for_shards.KeepsWeakly),
    "shards: a result multiplied by 0 on a rank": of_shards(for_shards.Skips),
    "shards: frozen in a step": of_shards(for_shards.FreezesInStep, ROOT, optimizer=plain_sgd),
    "shards: frozen in a step, units": of_shards(for_shards.FreezesInStep, UNITS, optimizer=plain_sgd),
    "shards: frozen in a step, units stay": of_shards(for_shards.FreezesInStep, {**UNITS, **STAY}, optimizer=plain_sgd),
    "shards: optimizers take turns, units stay": of_shards(for_shards.TakesTurns, {**UNITS, **STAY}),
    "shards: a hook before backward": of_shards(for_shards.LooksBeforeBackward, ROOT, optimizer=plain_sgd),
    "shards: names that ddp ignores": of_shards(for_shards.KeepsItsOwn),
    "shards: written, units": of_shards(for_shards.Teaches, UNITS),
    "shards: written, units stay": of_shards(for_shards.Teaches, {**UNITS, **STAY}),
    "shards: written by data.mul_(), root": of_shards(for_shards.by_way("by data.mul_()"), ROOT),
    "shards: written by foreach": of_shards(for_shards.by_way("foreach"), ONE_BY_ONE),
    "shards: written in their own dtype": of_shards(
        for_shards.Teaches, {**ROOT, "param_dtype": None}, trainer=AUTOCAST
    ),
    "shards: zeroed in a hook, units stay": of_shards(for_shards.ZeroesInHook, {**ONE_BY_ONE, **STAY}),
    "shards: halved in a window, whole": of_shards(for_shards.HalvesBetween, WHOLE, trainer=WINDOW),
    "shards: watched on a rank": of_shards(for_shards.WatchedOnARank, {**ONE_BY_ONE, **STAY, **WHOLE}, trainer=WINDOW),
    "shards: written by a block": of_shards(for_shards.Clamps, UNITS),
    "shards: views are changed": of_shards(for_shards.ChangesViews),
    "shards: views are changed, units": of_shards(for_shards.ChangesViews, UNITS, trainer=WINDOW),
    "shards: views are changed, units stay": of_shards(for_shards.ChangesViews, {**UNITS, **STAY}),
    # Losses that are made of gradients.
    "shards: called again": of_shards(for_shards.CalledAgain),
    "shards: called again, accumulated whole": of_shards(for_shards.CalledAgain, WHOLE, trainer=WINDOW),
    "shards: perturbed": of_shards(for_shards.Perturbed, STAY),
    "shards: perturbed, one by one": of_shards(for_shards.Perturbed, ONE_BY_ONE, trainer=WINDOW),
    "shards: checkpointed": of_shards(for_shards.Checkpointed, WHOLE, trainer=WINDOW),
    "shards: penalty alone": of_shards(for_shards.PenaltyAlone),
    "shards: penalty alone, one by one": of_shards(for_shards.PenaltyAlone, ONE_BY_ONE),
    "shards: two losses": of_shards(for_shards.TwoLosses),
    "shards: two losses, one by one": of_shards(for_shards.TwoLosses, ONE_BY_ONE),
    # DDP ends with an error.
    "shards: graph of a backward": of_shards(for_shards.GraphOfBackward, oracle="whole batch"),
    # 16 bits.
    "shards: bf16 autocast, a penalty on the root": of_shards(
        for_shards.Penalised, ROOT, optimizer=plain_sgd, trainer=AUTOCAST
    ),
    "shards: bf16 autocast": of_shards(for_shards.Normalised, trainer=AUTOCAST),
    "shards: bf16 autocast, gradients whole": of_shards(for_shards.Normalised, WHOLE, trainer={**AUTOCAST, **WINDOW}),
    # Convolutions' weights may stay whole, beside others that are sharded: torch unscales no mixture.
    "shards: fused beside whole weights": of_shards(zoo.Convolutional, optimizer=fused),
    "shards: a scaler": of_shards(zoo.Convolutional, trainer={"fp16": True}, tolerance=1e-3),
    # The meta device.
    "meta: rank 0 has values": of_shards(for_shards.Pretrained),
    "meta: rank 0 has values, no units": of_shards(for_shards.Pretrained, ROOT),
    "meta: made anew": of_shards(for_shards.MadeAnew, needs=CPU),
    "meta: made anew on rank 0": of_shards(for_shards.MadeOnRank0, needs=CPU),
    "meta: made anew, the root too": of_shards(for_shards.RootMakes, needs=CPU),
    # What shards cannot do.
    "shards: a penalty": of_shards(for_shards.Penalised, zero3="was computed from a weight of a block"),
    "shards: a penalty by hand": of_shards(
        for_shards.PenalisedByHand, zero3="In manual optimization, each child of the module is a block"
    ),
    "shards: a penalty, logged": of_shards(for_shards.LogsPenalty, zero3="was computed from a weight of a block"),
    "shards: another size": of_shards(
        for_shards.MakesIdentity, zero3="'blocks.1.linear.weight' was given another size"
    ),
    "shards: norms logged": of_shards(for_shards.LogsNorms, zero3="its data is not allocated yet"),
    "shards: gradients of gradients": of_shards(for_shards.SecondDerivatives, zero3=NOT_GATHERED),
    "shards: differentiated": of_shards(for_shards.Differentiated),
    "shards: arguments are added to": of_shards(for_shards.Adds, UNITS, trainer=WINDOW),
    "shards: arguments are added to, units stay": of_shards(for_shards.Adds, {**UNITS, **STAY}),
    "shards: arguments are added to in two ways": of_shards(for_shards.AddsTwice, UNITS, trainer=WINDOW),
    "shards: arguments are added to in two ways, units stay": of_shards(for_shards.AddsTwice, {**UNITS, **STAY}),
    "shards: objects with tensors": of_shards(for_shards.ReturnsObjects, UNITS, trainer=WINDOW),
    "shards: other backwards": of_shards(for_shards.Drops, zero3=DIFFERENT),
    "shards: other backwards, accumulated": of_shards(for_shards.Drops, zero3=DIFFERENT, trainer=WINDOW),
    "shards: other modules without gradients": of_shards(for_shards.CallsWithoutGradients, zero3=DIFFERENT),
    "shards: called with other parameters": of_shards(
        for_shards.CallsWithOthers, ONE_BY_ONE, zero3="is another tensor than the parameter"
    ),
    **{
        f"shards: tied late, {name}": of_shards(for_shards.TiesLate, options, zero3="is another tensor than the param")
        for name, options in {"in the root": ROOT, "units": UNITS}.items()
    },
    "shards: held": of_shards(for_shards.Holds, ROOT, zero3=HELD),
    "shards: held, between steps": of_shards(for_shards.ReadsBetween, ROOT, zero3=HELD),
    "shards: held by an optimizer": of_shards(for_shards.MadeEarly, zero3=HELD),
    "shards: rounded": of_shards(
        for_shards.by_way("by data.mul_()"),
        {**ROOT, "param_dtype": "bf16"},
        zero3=ROUNDED.format("the root"),
        trainer=AUTOCAST,
    ),
    "shards: rounded in evaluation": of_shards(
        for_shards.WritesInEvaluation,
        {**UNITS, **STAY},
        zero3=ROUNDED.format("blocks.0"),
        trainer={**AUTOCAST, "validate": True},
    ),
    "shards: data set in a step": of_shards(for_shards.WritesData, ROOT, zero3="`data` of parameter 'frozen.weight'"),
    "shards: data set on one rank": of_shards(for_shards.assigning("on_train_batch_end", 1), zero3=FORGETS),
    "shards: data set for evaluation": of_shards(
        for_shards.assigning("on_validation_epoch_start"), zero3=FORGETS, trainer={"validate": True}
    ),
    "shards: data set at the end": of_shards(for_shards.assigning("on_train_end"), zero3=FORGETS),
    "shards: data set before a save": of_shards(
        for_shards.assigning("on_train_batch_end", then_saves=True), zero3=FORGETS
    ),
    "shards: a captured graph": of_shards(for_shards.captured, zero3="make_graphed_callables"),
    "shards: no such class": of_shards(
        odd.Blocks, {"auto_wrap_policy": ["Nothing"]}, zero3="No module within Blocks is of such a"
    ),
    "shards: an unknown optimizer of matrices": of_shards(
        odd.Blocks, optimizer=for_shards.Matrixwise, zero3="Matrixwise cannot step sharded parameters"
    ),
    "shards: a list of parameters, by hand": of_shards(for_shards.ListByHand),
    "shards: sharded by hand": of_shards(
        for_shards.ShardedByHand, zero3="`fully_shard` or `parallelize_module` was called"
    ),
    "meta: the root cannot be made": of_shards(for_shards.OnMeta, zero3="scale of OnMeta"),
    "meta: sharing on rank 0 alone": of_shards(
        for_shards.SharesMemory, zero3="Some ranks can shard parameters that others cannot"
    ),
    # Of another package, in double precision: sharded where each parameter steps alone, else kept whole.
    "Lamb": third_party(of_others("Lamb", lr=0.01, eps=1e-4, weight_decay=0.01)),
    "Lamb, unused": third_party(of_others("Lamb", lr=0.01, eps=1e-4), zoo.Unused, ddp_tuned=WAITS),
    "Lamb, by parameter": third_party(of_others("Lamb", lr=0.01, eps=1e-4, foreach=False), trainer=CLIPPED_DOUBLE),
    "Lamb, scaled by the norm of all gradients": third_party(of_others("Lamb", lr=0.01, eps=1e-4, pre_norm=True)),
    "Shampoo": third_party(of_others("Shampoo", lr=0.01, momentum=0.5, matrix_eps=1e-2)),
    # Its bases of matrices of low rank are arbitrary, chosen by rounding: which is DDP's between two ranks alone, if
    # micro-batches are added in the same order.
    "SOAP": third_party(of_others("SOAP", lr=0.01, eps=1e-4, precondition_frequency=2), world_sizes=(2,), zero2=None),
    "SOAP, where ranks are full": third_party(
        of_others("SOAP", lr=0.01, eps=1e-4, precondition_frequency=2, max_precondition_dim=4), tolerance=FP32
    ),
    "Lion, clipped": third_party(of_others("Lion", lr=1e-3, weight_decay=0.01), trainer=CLIPPED_DOUBLE),
    "Adan": third_party(of_others("Adan", lr=0.01, eps=1e-4, weight_decay=0.01)),
    "Adan, clips by the norm of all gradients": third_party(of_others("Adan", lr=0.01, eps=1e-4, max_grad_norm=0.1)),
    "Adan, accumulated": third_party(
        of_others("Adan", lr=0.01, eps=1e-4), trainer={"accumulate_grad_batches": 3, **DOUBLE}
    ),
    "Prodigy": third_party(of_others("Prodigy", lr=1.0, eps=1e-4, d0=1e-3)),
    "ScheduleFreeAdamW": third_party(of_others("ScheduleFreeAdamW", lr=0.01, eps=1e-4), odd.Averaging),
}
KEPT_WHOLE = {name for name in CASES if "norm of all" in name} | {"Prodigy", "ScheduleFreeAdamW"}
"""Trainings by optimizers of another package that are not sharded."""
