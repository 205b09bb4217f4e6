"""Modules and optimizers that are out of the ordinary, and work under DDP. None knows of the package under test."""

import copy
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests import devices
from tests.strategies.odd_optimizers import OnASphere
from tests.strategies.zoo import FEATURES, MLP, Adversarial, OptimizerFactory, StepsByHand, Zoo, adamw


class SharedMemory(Zoo):
    """Two parameters over the same memory without being one, and a buffer that views a third."""

    def build(self) -> None:
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = nn.Parameter(self.first.weight.data)
        self.head = nn.Linear(FEATURES, 2)
        self.register_buffer("of_head", self.head.weight.data[0])

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(batch)))
        return (self.head(hidden).pow(2).mean(1) + hidden @ self.of_head).mean()


class Sparse(MLP):
    """The gradient of a table has the rows that were looked up alone."""

    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(5, FEATURES, sparse=True)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch + self.table(torch.zeros(len(batch), dtype=torch.long, device=batch.device)))


class NeverTrained(MLP):
    """A parameter without gradients of its own, in the optimizer, of a dtype that has none."""

    def build(self) -> None:
        super().build()
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)


class StridedBuffer(MLP):
    """A buffer that is a part of another tensor, and begins with other values on each rank."""

    def build(self) -> None:
        super().build()
        self.register_buffer("table", torch.arange(12.0)[::2] + 100 * dist.get_rank())

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) * self.table.sum() / 30


class SharedParameter(StepsByHand, MLP):
    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(self.parameters()), torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.5)]


class OutsideOptimizers(MLP):
    """A scale that is in no optimizer: the user steps it by its gradient."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.ones(3))
        self.bystander = nn.Parameter(torch.ones(2))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch * self.scale.repeat(4))

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        if self.scale.grad is not None:
            self.scale.data.sub_(self.scale.grad, alpha=0.1)
            self.scale.grad = None

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters())


class Layouts(Zoo):
    """Transposed, strided and permuted weights."""

    def build(self) -> None:
        self.transposed = nn.Parameter(torch.randn(5, FEATURES).t() / 3)
        self.strided = nn.Parameter((torch.randn(5, 8) / 3)[:, ::2])
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1) / 3)

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(batch @ self.transposed @ self.strided)
        return (hidden @ self.permuted.flatten(1)).pow(2).mean()


class SeveralDtypes(Zoo):
    def build(self) -> None:
        self.wide = nn.Linear(FEATURES, 7).double()
        self.narrow = nn.Linear(7, 5)
        self.head = nn.Linear(5, 1).double()

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.narrow(torch.tanh(self.wide(batch.double())).float()))
        return self.head(hidden.double()).pow(2).mean().to(batch.dtype)


class ReusedUnderCheckpoints(Zoo):
    """One layer twice in the same graph, under both kinds of activation checkpointing."""

    def build(self) -> None:
        self.first = nn.Linear(FEATURES, FEATURES)
        self.block = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, FEATURES))

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        hidden = checkpoint(self.block, hidden, use_reentrant=True)
        hidden = checkpoint(self.block, torch.tanh(hidden), use_reentrant=False)
        return (self.block(hidden) + hidden).pow(2).mean()


def compiler() -> str:
    """On a CPU the graph that a compiler makes, without its code; on a GPU with it, where Triton is there."""
    return "inductor" if devices.kind() == "cuda" and find_spec("triton") else "aot_eager"


def compiled_as_a_whole(make_optimizer: OptimizerFactory) -> Any:
    """What a user hands to `fit` after `torch.compile(module)`."""
    return torch.compile(MLP(make_optimizer), backend=compiler())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


class Blocks(Zoo):
    """Blocks that a subclass may compile, or call in a way of its own, and a head."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(FEATURES, 1)
        self.compile_blocks()

    def compile_blocks(self) -> None:
        """Compiles none."""

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)

    def compute_loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = self.run_block(block, batch)
        return (self.head(batch) - 0.2).pow(2).mean()


class CompiledBlocks(Blocks):
    """As the documentation advises: a block at a time, in place."""

    def compile_blocks(self) -> None:
        for block in self.blocks:
            block.compile(backend=compiler())


class WrappedBlocks(Blocks):
    def compile_blocks(self) -> None:
        self.blocks = nn.ModuleList(torch.compile(block, backend=compiler()) for block in self.blocks)


class CompiledAndCheckpointed(CompiledBlocks):
    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=False)


class ReentrantCheckpoints(Blocks):
    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=True)


class CompilesLater(MLP):
    """Makes a compiled function of its own in the middle of training, which reads parameters."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.penalty = torch.compile(lambda weight: weight.pow(2).sum(), backend="eager")
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(map(self.penalty, self.parameters())) if batch_idx >= 3 else loss


class CompilesItsStep(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        self.compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        return optimizer

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        self.compiled()


class Scheduled(MLP):
    """Schedulers from before the strategy sees the optimizer, and one from when it is trained."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.late = torch.optim.lr_scheduler.StepLR(self.trainer.optimizers[0], 3, gamma=0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        assert type(self.trainer.optimizers[0]) is self.trainer.optimizers[0].__class__ is torch.optim.Adam
        self.late.step()


class HoldsViews(MLP):
    """Holds what it once detached; under DDP that is the parameters' memory."""

    def on_train_start(self) -> None:
        self.views = [parameter.detach() for parameter in self.parameters()]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + sum(view.abs().sum() for view in getattr(self, "views", ())) * 0.1


class Parametrized(Zoo):
    def build(self) -> None:
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.utils.parametrizations.orthogonal(nn.Linear(8, 3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.head(torch.tanh(self.spectral(self.normed(batch)))).sub(0.1).pow(2).mean()


class Toggling(Zoo):
    """Which half trains changes with every batch."""

    def build(self) -> None:
        self.first = nn.Linear(FEATURES, 6)
        self.second = nn.Linear(6, 2)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(batch))).pow(2).mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.requires_grad_(batch_idx % 3 != 0)
        self.second.requires_grad_(batch_idx % 3 != 1)


class FrozenLater(MLP):
    """Its first layer stops training after three steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.global_step < 3)


class SwappedData(MLP):
    """Weights are clamped in place, replaced by other tensors, and swapped for others for a while."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[0].weight.data.clamp_(-0.2, 0.2)
        self.net[2].weight.data = self.net[2].weight.data * 0.95
        with torch.no_grad():
            self.net[4].bias.copy_(self.net[4].bias.sign() * 0.05)


class TradedData(MLP):
    """Data changes places: between parameters, and with tensors that the user keeps and uses, in turns."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.register_buffer("shadow", torch.linspace(-0.5, 0.5, 64).view(8, 8))
        self.register_buffer("alias", torch.zeros(8))

    def compute_loss(self, batch: Tensor) -> Tensor:
        loss = (self.net(batch).pow(2).sum(1) - batch.mean(1)).pow(2).mean()
        return loss * (1 + 0.1 * (self.shadow.sum() + self.alias.sum()).pow(2))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first, second = self.net[2].weight, self.net[4].weight
        if batch_idx % 3 == 0:
            first.data, second.data = second.data, first.data
        if batch_idx % 3 == 1:
            first.data, self.shadow.data = self.shadow.data, first.data
        if batch_idx == 2:
            # From here on the buffer is trained along with the parameter.
            self.alias = torch.full((8,), 0.1, device=self.device)
            self.net[4].bias.data = self.alias


class ChangesState(MLP):
    """Resets and changes the optimizer's state in training, in every way that a user might."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = self.optimizers(use_pl_optimizer=False).state
        first, second = self.net[0].weight, self.net[2].bias
        if batch_idx == 1:
            state[first] = {}
        if batch_idx == 2 and second in state:
            state[second]["exp_avg"].mul_(0.1)
            state[second]["step"].zero_()
        if batch_idx == 3:
            state.pop(second)
            del state[self.net[4].bias]
        if batch_idx == 4:
            state[first] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.full_like(first, 0.01),
                "exp_avg_sq": torch.linspace(0, 1, first.numel(), device=first.device).view_as(first),
            }
        if batch_idx == 5:
            state.setdefault(first, {}).get("exp_avg", torch.zeros(())).mul_(0.1)
            state.update({second: {name: one.clone() for name, one in state.get(second, {}).items()}})
            assert copy.copy(state).keys() == state.keys()
        if batch_idx == 6:
            state.clear()
        if batch_idx == 8:
            self.optimizers(use_pl_optimizer=False).state = defaultdict(dict)


class GroupsAdded(MLP):
    """Starts with one layer; the others join, one by a new group, one by being appended, with state carried over."""

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net[0].parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        if batch_idx == 2:
            optimizer.add_param_group({"params": list(self.net[2].parameters()), "lr": 0.02})
        if batch_idx == 4:
            optimizer.param_groups[0]["params"].extend(self.net[4].parameters())


class GetsHead(MLP):
    """In every epoch its head is replaced by another one, each rank's by its own random numbers, as without a seed."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            with torch.random.fork_rng():
                torch.manual_seed(self.draw_seed())
                self.net[4] = nn.Linear(17, 1, device=self.device)
            self.add_to_optimizer(list(self.net[4].parameters()))

    def draw_seed(self) -> int:
        return self.global_rank

    def add_to_optimizer(self, added: list[Tensor]) -> None:
        self.trainer.optimizers[0].add_param_group({"params": added})


class GetsHeadInItsGroup(GetsHead):
    def add_to_optimizer(self, added: list[Tensor]) -> None:
        self.trainer.optimizers[0].param_groups[0]["params"] += added


class MovesLayer(MLP):
    """A layer leaves an optimizer for another one, or joins it as well; each steps after a backward of its own."""

    automatic_optimization = False
    leaves = True

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:4].parameters(), 0.05, 0.9), torch.optim.SGD(self.net[4].parameters(), 0.05)]

    def on_train_epoch_start(self) -> None:
        first, second = self.trainer.optimizers
        if self.current_epoch == 1:
            second.add_param_group({"params": list(self.net[2].parameters()), "momentum": 0.9})
            if self.leaves:
                first.param_groups[0]["params"] = list(self.net[0].parameters())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.compute_loss(batch))
            optimizer.step()


class SharesLayer(MovesLayer):
    leaves = False


class GroupsEdited(MLP):
    """A group's list loses a parameter, is turned around, and gets the parameter back."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        group = self.optimizers(use_pl_optimizer=False).param_groups[0]["params"]
        if batch_idx == 2:
            self.left = [group.pop(1)]
        if batch_idx == 4:
            group.reverse()
        if batch_idx == 6:
            group.extend(self.left)


class WithHooks(MLP):
    """Looks at, and changes, gradients as they are accumulated, by hooks registered after everything was set up."""

    def on_train_start(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)
        self.seen = 0
        for parameter in self.net[2].parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter: Tensor) -> None:
        self.seen += 1
        parameter.grad.mul_(0.5)


class RepeatedBackward(StepsByHand, MLP):
    """Two losses, each with a backward, before one step; zeroed in place."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.compute_loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5 + self.net[2].weight.pow(2).sum() * 0.01)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()


class StepsBeforeABackward(MLP):
    """Steps between a forward and its backward, which torch refuses: the graph has saved what is no more."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        earlier, loss = self.compute_loss(batch), self.compute_loss(batch)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            earlier.backward()
        optimizer.zero_grad()
        return loss.detach()


class TwoHeads(Zoo):
    """Two losses over one trunk, each with a backward of its own that leaves the other's head alone."""

    automatic_optimization = False

    def build(self) -> None:
        self.trunk = nn.Linear(FEATURES, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for head in self.heads:
            self.manual_backward(head(torch.tanh(self.trunk(batch))).pow(2).mean())
        assert all(parameter.grad is not None for parameter in self.heads.parameters())
        optimizer.step()
        return torch.zeros(())


class InnerBackward(MLP):
    """Looks for a perturbation by backwards of its own, more of them on one rank than on another."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        adversarial = batch.clone()
        for _ in range(1 + int(batch[0, 0] > 0)):
            adversarial.requires_grad_(True)
            self.compute_loss(adversarial).backward()
            adversarial = (adversarial + 0.01 * adversarial.grad.sign()).detach()
        self.zero_grad()
        return self.compute_loss(adversarial)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            if batch[0, 0] > 0:
                self.compute_loss(batch.clone()).backward()


class MoreOptimizers(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)]


class FrozenBetween(StepsByHand, MLP):
    """A layer is frozen while backward is over and the step is not yet done, on every rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.net[2].requires_grad_(True)
        loss = self.compute_loss(batch if batch_idx % 2 else batch * 2)
        self.manual_backward(loss)
        self.net[2].requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


class MovesOver(StepsByHand, MLP):
    """A parameter of one optimizer joins another one's groups; each zeroes its own gradients alone."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()
        if batch_idx == 2:
            second.optimizer.param_groups[0]["params"].append(self.net[0].bias)
        self.manual_backward(self.compute_loss(batch))
        second.step()
        second.zero_grad()
        if batch_idx % 2:
            first.step()
            first.zero_grad()
        return torch.zeros(())

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(self.net[0].parameters()), self.make_optimizer(self.net[2].parameters())]


class ReloadsState(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.load_state_dict(optimizer.state_dict())


class ByClosure(StepsByHand, MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.compute_loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure=closure)
        return loss.detach()


class Unannounced(StepsByHand, MLP):
    """Calls backward by itself, which Lightning's DDP does not synchronise: the ranks part. Here they do not."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.compute_loss(batch)
        loss.backward()
        optimizer.step()
        self.zero_grad(set_to_none=batch_idx % 2 == 0)
        return loss.detach()


class UnannouncedScalar(Unannounced):
    """It has a parameter that no strategy shards."""

    def build(self) -> None:
        super().build()
        self.factor = nn.Parameter(torch.tensor(1.3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.factor * super().compute_loss(batch)


class TwoSpeeds(Adversarial):
    """A GAN whose discriminator steps twice as often; models toggled without synchronising while they accumulate."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for_generator, for_discriminator = self.optimizers()
        for half in batch.chunk(2):
            last = half is not None and half.data_ptr() != batch.data_ptr()
            with for_discriminator.toggle_model(sync_grad=last):
                fake = self.generator(half[:, :4]).detach()
                loss = F.softplus(-self.discriminator(half)).mean() + F.softplus(self.discriminator(fake)).mean()
                self.manual_backward(loss / 2)
                if last:
                    for_discriminator.step()
                    for_discriminator.zero_grad()
        if batch_idx % 2:
            self.toggle_optimizer(for_generator)
            self.manual_backward(F.softplus(-self.discriminator(self.generator(batch[:, :4]))).mean())
            for_generator.step()
            self.generator.zero_grad()
            self.untoggle_optimizer(for_generator)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [
            self.make_optimizer(self.generator.parameters()),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9),
        ]


class GradientPenalty(StepsByHand, MLP):
    """A graph through gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        inputs = batch.clone().requires_grad_(True)
        outputs = self.net(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = outputs.pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class ByGradientsBefore(MLP):
    """Reads gradients between the announcement of a backward and the backward, and penalises them."""

    def on_before_backward(self, loss: Tensor) -> None:
        (self.seen,) = torch.autograd.grad(loss, self.net[2].bias, retain_graph=True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        slopes = torch.autograd.grad(loss, list(self.net[0].parameters()), create_graph=True)
        (loss + 0.3 * sum(slope.pow(2).sum() for slope in slopes)).backward()


class ZeroesBefore(MLP):
    """Zeroes gradients between the announcement of a backward and the backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.optimizers().zero_grad()


class TwoBackwards(MLP):
    """Another backward before that of the loss, and one after it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (0.1 * loss).backward(retain_graph=True)
        (0.4 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()


class Doubled(nn.Parameter):
    """Counts twice in a linear layer."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            inputs, weight, *bias = args
            args = (inputs, 2 * weight.as_subclass(Tensor), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnClass(MLP):
    def build(self) -> None:
        super().build()
        self.net[0].weight = Doubled(self.net[0].weight.data)


class Averaging(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.optimizers(use_pl_optimizer=False).eval()
            self.optimizers(use_pl_optimizer=False).train()


class Scaled(MLP):
    """Sets on parameters what its optimizer reads, before the training and in it."""

    def build(self) -> None:
        super().build()
        self.net[0].weight.scale = 3.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].weight.scale = 0.2 if batch_idx > 1 else 1.0


class OnSpheres(MLP):
    def build(self) -> None:
        super().build()
        self.net[2].weight = OnASphere(F.normalize(self.net[2].weight.detach()))


class Matrices(StepsByHand, MLP):
    """Matrices of different shapes by one optimizer, everything else by another."""

    def build(self) -> None:
        super().build()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 24), nn.Linear(24, 1)
        )

    def configure_optimizers(self) -> Any:
        return [
            self.make_optimizer([p for p in self.parameters() if p.ndim == 2]),
            adamw([p for p in self.parameters() if p.ndim != 2]),
        ]
