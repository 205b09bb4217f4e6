"""Modules that ``zero3_custom`` alone could get wrong, or cannot train: rows of the table of cases.

Writes within a step, losses that are made of gradients, 16 bits, modules on the meta device, and whatever holds a
parameter.
"""

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_parstrat import ZeRO3Strategy
from tests.strategies import zoo
from tests.strategies.odd import Blocks
from tests.strategies.zoo import FEATURES


class Penalised(Blocks):
    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class PenalisedByHand(zoo.StepsByHand, Penalised):
    pass


class LogsPenalty(Penalised):
    """The log of all ranks' mean comes before what the step returns."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.compute_loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


class FreezesInStep(Blocks):
    """In its second step, for good: a layer of the root before its use, and a block after that."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        if self.global_step == 1:
            self.head.requires_grad_(False)
        loss = super().compute_loss(batch)
        if self.global_step == 1:
            self.blocks[1].requires_grad_(False)
        return loss


class TakesTurns(Blocks):
    """Two optimizers over two batches each. The first one's backward does not reach what the second one steps."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.compute_loss(batch))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.blocks[0].linear.bias.requires_grad_(batch_idx % 4 < 2)

    def configure_optimizers(self) -> Any:
        parts = [*self.blocks[1:].parameters(), *self.head.parameters()], self.blocks[0].parameters()
        return [torch.optim.SGD(part, lr=0.1) for part in parts]


class MakesIdentity(Blocks):
    """torch gives the whole matrix to this rank's rows."""

    def on_train_batch_start(self, *args: Any) -> None:
        nn.init.eye_(self.blocks[1].linear.weight)


class KeepsGraphs(Blocks):
    """Of what it computes of weights between steps, with the graph that leads to them."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.norm = sum(parameter.norm() for parameter in self.parameters())


class KeepsWeakly(Blocks):
    """As libraries do that average weights."""

    def on_fit_start(self) -> None:
        self.known = [weakref.ref(parameter) for parameter in self.parameters()]


class Skips(zoo.Zoo):
    """All ranks call all of three blocks alike; one of them makes nothing of what the second returns."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            batch = batch + block(batch) * float(number != 1 or dist.get_rank() != 1)
        return (batch - 1).square().mean()


# Writes within a step.


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda teacher, student: teacher.mul_(0.9).add_(student, alpha=0.1),
    "by data.mul_()": lambda teacher, student: teacher.data.mul_(0.9).add_(student.data, alpha=0.1),
    "foreach": lambda teacher, student: torch._foreach_lerp_([teacher], [student], 0.1),
}


class Teaches(Blocks):
    """Keeps a teacher's moving average in ``training_step``, as BYOL, MoCo and DINO do."""

    way = "in place"

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                WRITES[self.way](teacher, student)
            target = batch
            for block in self.teacher:
                target = block(target)
        return super().compute_loss(batch) + (target - self.blocks[0](batch)).pow(2).mean()


def by_way(way: str) -> type[Blocks]:
    return type("Teaches", (Teaches,), {"way": way})


class Clamps(Blocks):
    """Each block keeps its weight within bounds in its own forward, where it is gathered."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, _: block.linear.weight.data.clamp_(-0.1, 0.1))


# Losses that are made of gradients, and training steps that take gradients of their own.


def slope(outputs: Tensor, inputs: Tensor, create_graph: bool = True) -> Tensor:
    (found,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=create_graph)
    return found


def penalty(outputs: Tensor, inputs: Tensor) -> Tensor:
    return (slope(outputs, inputs).norm(dim=1) - 1).pow(2).mean()


class Scores(zoo.Zoo):
    """Blocks that are units, between layers of the root; nobody uses the last layer."""

    def build(self) -> None:
        self.entrance = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.exit = nn.Linear(8, 1)
        self.unused = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def score(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.entrance(batch))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.exit(hidden)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.score(batch).pow(2).mean()


class Viewing(nn.Module):
    """Returns views: of its result, and of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Parameter(torch.linspace(-1, 1, 32).view(4, 8))

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        hidden = self.linear(torch.tanh(hidden)).view(-1, 2, 4)
        return {"hidden": hidden, "part": self.table[:2].sum(0), "table": self.table, "first": self.table[0]}


class ChangesViews(Scores):
    """Changes what blocks return in place, and uses tables of blocks that have run."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(Viewing() for _ in range(3))

    def score(self, batch: Tensor) -> Tensor:
        hidden, tables = torch.tanh(self.entrance(batch)), 0.0
        for block in self.blocks:
            outputs = block(hidden)
            tables = tables + outputs["table"].mean() + outputs["first"].pow(2).mean() + outputs["part"].mean()
            new = outputs["hidden"]
            new += hidden.view(-1, 2, 4)
            new[:, 0] *= 0.5
            hidden = torch.relu_(new).flatten(1)
        return self.exit(hidden) + tables


class PutsIntoObjects(Viewing):
    """Its results are in a list that it is given, in an attribute, and in an object, where FSDP2 finds none."""

    def forward(self, hidden: Tensor, found: list[Tensor]) -> SimpleNamespace:  # type: ignore[override]
        found.append(torch.tanh(hidden) * self.table[0])
        self.kept = hidden * self.table.mean()
        return SimpleNamespace(hidden=self.linear(torch.tanh(hidden)))


class Differentiated(Scores):
    """Blocks run within a transform of ``torch.func``, whose tensors have no address."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        outputs, pull = torch.func.vjp(self.score, batch)
        (slopes,) = pull(torch.ones_like(outputs))
        return outputs.square().mean() + slopes.square().mean()


class AddsToArguments(nn.Sequential):
    """Adds to a list and to a dictionary, of which FSDP2 gives it copies."""

    def forward(self, hidden: Tensor, found: list[Tensor], means: dict[str, Any]) -> Tensor:  # type: ignore[override]
        new = super().forward(hidden)
        found.append(new.square().mean())
        means["all"].append(self[0](new).mean())
        means["last"] = means["last"] + new.mean()
        return new


class Adds(Scores):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(AddsToArguments(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden, found, means = torch.tanh(self.entrance(batch)), list[Tensor](), {"all": [], "last": 0.0}
        for block in self.blocks:
            hidden = block(hidden, found, means=means)
        added = (*found, *means["all"], means["last"])
        return (self.exit(hidden).mean() + torch.stack(added).sum() - 1).square()


class AddsTwice(Adds):
    """Blocks are called twice, and get one list in two ways. One of them is frozen."""

    def build(self) -> None:
        super().build()
        self.blocks[1].requires_grad_(False)

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden, found = torch.tanh(self.entrance(batch)), list[Tensor]()
        for block in (*self.blocks, *self.blocks):
            means = {"all": found, "last": hidden.mean()}
            hidden = block(hidden, found, means=means) * means["last"] * len(found)
        return (self.exit(hidden).mean() + torch.stack(found).sum() - 1).square()


class ReturnsObjects(Scores):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(PutsIntoObjects() for _ in range(3))

    def score(self, batch: Tensor) -> Tensor:
        hidden, found = torch.tanh(self.entrance(batch)), []
        for block in self.blocks:
            hidden = torch.tanh(block(hidden, found).hidden) + block.kept
        return self.exit(hidden + torch.stack(found).mean(0))


class CalledAgain(Scores):
    """Everything is called once more when the gradient is there, which is freed by FSDP2 once the call was run back."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        penalised = penalty(self.score(inputs), inputs)
        return penalised + self.score(batch * 2).pow(2).mean()


class Perturbed(Scores):
    """Looks for a perturbation by gradients of inputs alone, as often on every rank."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        for _ in range(2):
            inputs = batch.clone().requires_grad_(True)
            batch = batch + 0.1 * slope(self.score(inputs), inputs, create_graph=False).sign()
        return self.score(batch).pow(2).mean()


class PerturbedByBackward(Scores):
    """Looks for it by a backward, which leaves gradients of parameters until they are zeroed."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        with torch.enable_grad():
            self.score(inputs).sum().backward()
        return self.score(batch + 0.1 * inputs.grad.sign()).pow(2).mean()


class ByInputs(Scores):
    def backward(self, loss: Tensor) -> None:
        loss.backward(inputs=[one for one in self.parameters() if one.requires_grad])


class AllowsUnused(Scores):
    def backward(self, loss: Tensor) -> None:
        parameters = [*self.parameters()]
        for one, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            one.grad = gradient


class Checkpointed(Scores):
    def score(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.entrance(batch))
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.exit(hidden)

    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        outputs = self.score(inputs)
        return outputs.pow(2).mean() + penalty(outputs, inputs)


class ManualScores(Scores):
    """One step by hand with gradients that are zeroed first."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.run_backwards(batch, batch.clone().requires_grad_(True))
        optimizer.step()
        return loss.detach()

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        raise NotImplementedError


class PenaltyAlone(ManualScores):
    """Of the last layer nothing but its weights counts."""

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        loss = penalty(self.score(inputs), inputs)
        self.manual_backward(loss)
        return loss


class TwoLosses(ManualScores):
    """A backward before that of the penalty, and one after it."""

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        self.manual_backward(self.score(batch).pow(2).mean())
        self.manual_backward(penalty(self.score(inputs), inputs))
        self.manual_backward(self.score(batch).abs().mean())
        return torch.zeros(())


class ListByHand(zoo.StepsByHand, zoo.MLP):
    """A list of parameters has no forward that could gather them."""

    def build(self) -> None:
        super().build()
        self.scales = nn.ParameterList([torch.ones(FEATURES)])

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch * self.scales[0])


class GraphOfBackward(ManualScores):
    """A backward that makes a graph of itself, of which nothing is made; DDP ends with an error."""

    def run_backwards(self, batch: Tensor, inputs: Tensor) -> Tensor:
        loss = self.score(batch).pow(2).mean()
        self.manual_backward(loss, create_graph=True)
        return loss


# 16 bits.


class Normalised(zoo.Zoo):
    """Layers that autocast rounds, and layers that it does not: an embedding and norms."""

    def build(self) -> None:
        self.position = nn.Embedding(4, FEATURES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(FEATURES)
        self.unused = nn.Linear(FEATURES, 1)
        self.head = nn.Linear(FEATURES, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        batch = batch + self.position(torch.arange(len(batch), device=batch.device) % 4)
        for block in self.blocks:
            batch = batch + block(batch)
        return self.head(self.norm(batch)).square().mean()


class LooksBeforeBackward(zoo.MLP):
    """A hook runs before backward. The step calls the module itself, and reads a weight between its calls."""

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        return loss * (1 + next(self.parameters()).detach().square().sum()) + self(2 * batch).mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen = next(self.parameters()).shape


class KeepsItsOwn(zoo.MLP):
    """Has a parameter and a buffer of the rank's own."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.full((2,), float(dist.get_rank())), requires_grad=False)
        self.register_buffer("mine", self.scale.detach() + 1)
        self._ddp_params_and_buffers_to_ignore = ["scale", "mine"]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) * (self.scale + self.mine).sum()


# The meta device: the values are rank 0's, wherever rank 0 has them from. Ranks are seeded differently.


# Which ranks make the module on the meta device.
ALONE, OTHERS, ALL = "rank 0", "other ranks", "all ranks"


class MadeLater(zoo.Zoo):
    on_meta = ALL

    def build(self) -> None:
        pass

    def make_net(self) -> nn.Module:
        raise NotImplementedError

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            rank = dist.get_rank()
            torch.manual_seed(10 + rank)
            meta = {OTHERS: rank > 0, ALONE: rank == 0, ALL: True}[self.on_meta]
            # The oracle makes it at once.
            with torch.device("meta" if meta and isinstance(self.trainer.strategy, ZeRO3Strategy) else "cpu"):
                self.net = self.make_net()

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - 1).pow(2).mean()


class Block(nn.Module):
    """As those of other packages: nothing says how its values are made again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))
        self.register_buffer("shift", torch.rand(FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight + self.shift)


class Pretrained(MadeLater):
    """Has values on rank 0 alone."""

    on_meta = OTHERS

    def make_net(self) -> nn.Module:
        net = nn.Sequential(Block(), Block(), nn.Linear(FEATURES, 3), nn.Linear(3, 3))
        net.append(tied := nn.Linear(3, 3))
        tied.weight = net[3].weight
        return net


class SharesMemory(Pretrained):
    """What cannot be sharded shows on rank 0 alone: the meta device has no memory to share."""

    def make_net(self) -> nn.Module:
        net = super().make_net()
        if not net[0].weight.is_meta:
            net[1].weight.data = net[0].weight.data.t()
        return net


class Seeded(nn.Linear):
    """Draws by its own size and the rank's seed, in whatever order layers are made, and leaves the generator alone."""

    def reset_parameters(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed() + self.in_features)
            super().reset_parameters()


class MadeAnew(MadeLater):
    """All parts say how they are made, and one draws numbers in training."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(Seeded(FEATURES, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), Seeded(8, 1))


class RootMakes(MadeLater):
    """Has a parameter of its own."""

    def make_net(self) -> nn.Module:
        self.scale = nn.Parameter(torch.ones(8))
        return Seeded(FEATURES, 8)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) * self.scale).pow(2).mean()


class OnMeta(RootMakes):
    """Its class does not say how it is made, nor does that of what follows."""

    reset_parameters = None  # type: ignore[assignment]


class MadeOnRank0(MadeAnew):
    """The other way round: what rank 0 makes counts, not what another rank has."""

    on_meta = ALONE


# Code that takes shards for whole tensors.


class LogsNorms(Blocks):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class SecondDerivatives(Scores):
    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        first = slope(self.score(inputs), inputs)
        return slope(first.pow(2), inputs).pow(2).mean() + first.pow(2).mean()


# Ranks that use different modules.


class Drops(Skips):
    """One rank makes nothing of what the second block returns: each rank would send another unit's gradients."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        returned = [block(batch) for block in self.blocks]
        return (sum(returned if dist.get_rank() != 1 else returned[::2]) - 1).square().mean()


class CallsWithoutGradients(Skips):
    """A rank calls another block than the others without gradients, such as a teacher's, in a training step."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.blocks[1 + dist.get_rank()](batch)
        return (self.blocks[0](batch) - target).square().mean()


class CallsWithOthers(zoo.MLP):
    """A block is called with other parameters than its own."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        doubled = {name: 2 * parameter for name, parameter in self.net.named_parameters()}
        return torch.func.functional_call(self.net, doubled, (batch,)).square().mean()


class TiesLate(Blocks):
    """Layers that are sharded share a weight from then on."""

    def on_fit_start(self) -> None:
        self.blocks[1].linear.weight = self.blocks[0].linear.weight


# Held parameters, and writes within a step.


class Holds(Blocks):
    """Penalises a weight of a block through a list that has held it since it was made."""

    def build(self) -> None:
        super().build()
        self.held = [self.blocks[0].linear.weight]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.1 * sum(weight.pow(2).sum() for weight in self.held)


class ReadsBetween(Blocks):
    """Reads a held weight when a step has ended."""

    def build(self) -> None:
        super().build()
        self.held = [self.head.weight]

    def on_train_batch_end(self, *_: Any) -> None:
        torch._foreach_norm(self.held)


class WritesData(Blocks):
    """Sets `data` of a frozen weight where it is gathered."""

    def build(self) -> None:
        super().build()
        self.frozen = nn.Linear(FEATURES, 1).requires_grad_(False)

    def compute_loss(self, batch: Tensor) -> Tensor:
        self.frozen.weight.data = self.frozen.weight.data * 0.9
        return super().compute_loss(batch)


class WritesInEvaluation(Blocks):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)
        with torch.no_grad():
            self.blocks[0].linear.weight.mul_(2)


def assigning(hook: str, only_rank: int | None = None, then_saves: bool = False) -> type[Blocks]:
    """Sets `data` of a weight in a hook, which torch forgets."""

    def assign(module: Any, *_: Any) -> None:
        if only_rank in (None, module.global_rank):
            module.blocks[1].linear.weight.data = torch.zeros(FEATURES, FEATURES, device=module.device)
        if then_saves:
            module.trainer.save_checkpoint("never written")

    return type("Assigns", (Blocks,), {hook: assign})


class Matrixwise(torch.optim.Adafactor):
    """As another package's might be: not known by its class."""


class MadeEarly(Blocks):
    """Its optimizer is of parameters before they were sharded."""

    def build(self) -> None:
        super().build()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


def captured(make_optimizer: zoo.OptimizerFactory) -> Blocks:
    """Does to a module what ``torch.cuda.make_graphed_callables`` does, but for the graph."""
    module = Blocks(make_optimizer)
    forward = module.blocks[1].forward

    def graphed(*inputs: Tensor) -> Tensor:
        return forward(*inputs)

    graphed.__module__ = torch.cuda.graphs.make_graphed_callables.__module__
    module.blocks[1].forward = graphed
    return module


class ShardedByHand(Blocks):
    def configure_model(self) -> None:
        fully_shard(self.blocks[0])


class ZeroesInHook(Blocks):
    """Not after each step, and not by the optimizer."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            self.zero_grad()


class HalvesBetween(Blocks):
    """Halves what is accumulated so far."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class WatchedOnARank(Blocks):
    """Hooks that do nothing, on one rank alone."""

    def on_fit_start(self) -> None:
        if self.global_rank == 1:
            self.on_after_backward = self.on_before_backward = lambda *_: None
