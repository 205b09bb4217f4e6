"""A module's own step, run from the first block of a stage to its last.

Blocks of earlier stages are not run. The last of them returns what the earlier stage has sent, and the others return
tensors without values. The parameters of other stages have no values, either (``FakeTensor``). So the code of a step
runs unchanged, up to its stage's blocks. After the last of them an exception carries the output out of the step. What
was computed without values must not reach a block or a loss: that is found by its type, and is an error.
"""

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.stages import Stages
from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.pipeline.no_values import running_step, without_values
from lightning_parstrat.distributed.pipeline.sharded_blocks import ShardedBlocks
from lightning_parstrat.distributed.torch_compat import (
    NO_VALUES,
    FakeTensor,
    compiled_call,
    has_forward_hooks,
    has_memory,
    set_compiled_call,
    version_of,
)

_NOT_SEEN = (
    "The stage that computes the loss does not see it. Return it from the block, or `detach()` it if nothing else reads"
    " it. Or take a strategy that keeps the module whole."
)


class PipelineError(RuntimeError):
    """A module's step cannot be cut into stages, or has failed on a rank of the pipeline. All its ranks raise it."""


class _Cut(BaseException):
    """Carries the output of a stage's last block out of a step."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class _Run:
    """One run of a step, from the first block of a stage to its last."""

    def __init__(
        self,
        own: range,
        received: Sequence[Tensor],
        shapes: Sequence[Any],
        is_last: bool,
        seed: Callable[[int], None],
    ) -> None:
        self.own, self.received, self.shapes, self.is_last, self.seed = own, received, shapes, is_last, seed
        self.next = 0
        self.eager = ExitStack()
        """Until its first own block, within which compiled code is not used."""
        self.trains = torch.is_grad_enabled()
        self.stale: list[Any] = []
        """Arguments that blocks of earlier stages have changed in place. Here they are as before."""
        self.outer: list[tuple[Tensor, Tensor]] = []
        """Buffers outside of blocks and the values that they get back before the stage's first block."""

    def returned(self, number: int) -> Any:
        """The output of a block of an earlier stage."""
        # A copy, as code may change its input in place.
        shapes = _fresh(self.shapes[number])
        if number < self.own.start - 1:
            return shapes
        tensors = iter(self.received)
        return replace_leaves(shapes, lambda _: _not_a_leaf(next(tensors)))


class CutModule:
    """Runs the steps of a module in stages. Between steps the module is as before. Not collective.

    Args:
        module: The module.
        blocks: Its blocks by their names, in the order in which a step calls them.
        stages: Which blocks a stage has.
        sharded: Those of this rank, if the ranks of a stage divide them.
    """

    def __init__(
        self, module: nn.Module, blocks: dict[str, nn.Module], stages: Stages, sharded: ShardedBlocks | None = None
    ) -> None:
        self._module, self._names, self._blocks = module, list(blocks), list(blocks.values())
        self._stages, self._sharded = stages, sharded
        within = {buffer for block in self._blocks for buffer in block.buffers()}
        self._outer_buffers = [buffer for buffer in module.buffers() if buffer not in within]
        of_blocks = {part for block in self._blocks for part in block.modules()}
        self._outer_modules = [part for part in module.modules() if part not in of_blocks]
        self._run: _Run | None = None
        self._runs: dict[tuple[int, int], _Run] = {}
        """Those whose backward is to come, by stage and micro-batch."""
        self._again: _Run | None = None
        """That whose backward runs."""
        self._changed: dict[tuple[int, bool], list[int]] = {}
        """Which of its arguments a block changes in place, by its number, with and without gradients."""
        called = [*enumerate(self._blocks)]
        self._hooks: list[RemovableHandle] = []
        if sharded is not None:
            # FSDP2's hooks have come before, and see what a block returns.
            self._hooks = [block.register_forward_hook(functools.partial(self._end, n)) for n, block in called]
            called += [(self._names.index(name), block) for name, block in sharded.originals.items()]
        self._had_forward = [(block, vars(block).get("forward")) for _, block in called]
        # torch would compile the code of a stage, too.
        self._had_compiled = [(block, call) for _, block in called if (call := compiled_call(block)) is not None]
        for number, block in called:
            if (call := compiled_call(block)) is not None:
                set_compiled_call(block, functools.partial(self._call, number, call))
            else:
                vars(block)["forward"] = functools.partial(self._call, number, block.forward)

    def close(self) -> None:
        """Gives the blocks their own forward again."""
        for hook in self._hooks:
            hook.remove()
        for block, before in self._had_forward:
            if before is None:
                vars(block).pop("forward", None)
            else:
                vars(block)["forward"] = before
        for block, call in self._had_compiled:
            set_compiled_call(block, call)

    @property
    def hooked(self) -> list[str]:
        """Modules in blocks whose outputs hooks of the program may collect. A block's own hooks run on all ranks."""
        blocks = dict(zip(self._names, self._blocks, strict=True)) if self._stages.count > 1 else {}
        blocks |= {} if self._sharded is None else self._sharded.originals
        parts = (pair for name, block in blocks.items() for pair in block.named_modules(prefix=name))
        return [name for name, part in parts if name not in blocks and has_forward_hooks(part, before=False)]

    def shapes(self, step: Callable[[], Any]) -> list[Any]:
        """The output of each block but those of the last stage, without values.

        It runs the code before the first block, and the blocks without values. Nothing is computed in them.

        Args:
            step: Runs a step on a batch.

        Raises:
            PipelineError: Blocks are called in another order, or decide by values.
        """
        ends = self._stages.bounds[-2]
        run = _Run(range(len(self._blocks)), [], [], is_last=False, seed=lambda _: None)
        found: list[Any] = []

        def note(output: Any) -> Any:
            if next(leaves(output), None) is None:
                raise PipelineError(
                    f"{self._names[len(found)]!r} returns {type(output).__name__}, in which no tensor is found. A block"
                    " returns tensors, alone or in dictionaries, lists or tuples."
                )
            # A copy, as a later block may change it in place.
            if place := next(filter(None, map(_tensor_of, _parts(output))), ""):
                raise PipelineError(
                    f"{self._names[len(found)]!r} returns an object with a tensor in {place!r}. Other stages get the"
                    " tensors that a block returns alone, in dictionaries, lists or tuples."
                )
            found.append(_fresh(replace_leaves(output, lambda one: one.view_as(one))))
            if len(found) == ends:
                raise _Cut(output)
            return output

        with nullcontext() if self._sharded is None else self._sharded.originals_in_place():
            # What modules keep, such as statistics, metrics or a table, is to be as before. Some has no values here.
            buffers = [(one, one.clone()) for one in self._module.buffers()]
            frozen = {name: version_of(one) for name, one in self._frozen()}
            try:
                with _restored(self._module.modules()):
                    if ends:
                        self._running(run, step, note)
            finally:
                _copy_back(buffers)
            if changed := [n for n, one in self._frozen() if n in frozen and version_of(one) != frozen[n]]:
                raise PipelineError(
                    f"A step changes {listed(changed)}, which has no gradient, before its first block. Ranks would do"
                    " so a different number of times. Change it in a hook, such as `on_train_batch_start`."
                )
        return found

    def run(
        self,
        stage: int,
        number: int,
        step: Callable[[], Any],
        received: Sequence[Tensor],
        shapes: Sequence[Any],
        seed: Callable[[int], None],
        keeps: bool,
    ) -> Any:
        """Runs a stage of a step.

        Args:
            stage: The stage.
            number: The number of a micro-batch.
            step: Runs a step on it.
            received: The tensors of the output of the block before the stage.
            shapes: See :meth:`shapes`.
            seed: Called with a number at the beginning, and before and after each block. It seeds random numbers. So a
                block draws the same ones in whatever stage, and all stages draw the same ones outside of blocks.
            keeps: Whether metrics and attributes outside of blocks stay as the step leaves them. That is so in one of a
                rank's stages, as each runs the code before the first block.

        Returns:
            The output of the stage's last block. Of the last stage, what the step returns.

        Raises:
            PipelineError: The step cannot be cut.
        """
        own = self._stages.blocks(stage)
        is_last = stage == self._stages.count - 1
        run = _Run(own, received, shapes, is_last, seed)
        if stage >= self._stages.ranks:
            # An earlier stage of this rank has run the code before the first block.
            run.outer = self._outer_values()
        seed(0)
        with _restored([] if keeps else self._outer_modules):
            output = self._running(run, step, None)
        if run.trains:
            run.stale, run.outer = [], []
            self._runs[stage, number] = run
        what = "the result of the step" if is_last else f"the output of {self._names[own.stop - 1]!r}"
        self._refuse_without_values(output, what)
        if not is_last and own.stop <= len(shapes):
            self._compare(output, shapes[own.stop - 1], self._names[own.stop - 1])
        return output

    @contextmanager
    def backward(self, stage: int, number: int, ends: bool) -> Iterator[None]:
        """Within it, a stage's backward runs on a micro-batch. Activation checkpointing around blocks calls them again.

        Args:
            stage: The stage.
            number: The number of the micro-batch.
            ends: Whether no other backward of both is to come.
        """
        self._again = self._runs.pop((stage, number), None) if ends else self._runs.get((stage, number))
        try:
            yield
        finally:
            self._again = None

    def forget_runs(self) -> None:
        """Call it when a step has ended."""
        self._runs.clear()

    def _running(self, run: _Run, step: Callable[[], Any], note: Callable[[Any], Any] | None) -> Any:
        self._run, self._note = run, note
        try:
            # Compiled code does not notice that tensors have no values, and would read their memory.
            with running_step(self._module.parameters, draws=note is None), run.eager:
                if run.own.start or note is not None:
                    run.eager.enter_context(torch.compiler.set_stance("force_eager"))
                output = step()
        except _Cut as cut:
            return cut.output
        except NO_VALUES as error:
            raise PipelineError(
                "Code outside of the blocks of a stage reads or decides by values that another stage computes. All"
                " ranks run that code, and only one of them has the values. Move it into a block, or after the last."
            ) from error
        finally:
            self._run = self._note = None
        if run.next < len(self._blocks):
            raise PipelineError(
                f"A step has not called {self._names[run.next]!r}. Each block is to be called once in a step. Name the"
                " classes of the blocks that are, by `auto_wrap_policy`. What is not called, such as a teacher, needs"
                " another class. If `training_step` returns None, return a loss times 0 instead."
            )
        return output

    def _call(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return self._call_again(number, forward, *args, **kwargs)
        name = self._names[number]
        if number != run.next:
            other = self._names[run.next] if run.next < len(self._names) else "the end"
            raise PipelineError(
                f"A step has called {name!r}, and {other!r} was to come. The blocks of a pipeline are called once"
                " each, in the order of their registration. Name the classes of such blocks by `auto_wrap_policy`."
            )
        run.next += 1
        given = [*_parts((args, kwargs))]
        if any(part is one for part in given for one in run.stale):
            raise PipelineError(
                f"{name!r} is given what an earlier block was given, too, and has changed in place. Other stages do not"
                " see that change. Return it from the block, and pass on what the block returns."
            )
        if number < run.own.start:
            if number == 0 and not run.outer:
                run.outer = self._outer_values()
            run.stale += [given[place] for place in self._changed.get((number, run.trains), ()) if place < len(given)]
            if number == run.own.start - 1:
                _copy_back(run.outer)
                run.eager.close()
            run.seed(2 * number + 2)
            return run.returned(number)
        if self._note is not None:
            with _no_values(name):
                return self._note(self._without_values((number, run.trains), forward, args, kwargs))
        self._refuse_without_values((args, kwargs), f"an input of {name!r}")
        trained = run.trains and any(one.requires_grad for one in self._blocks[number].parameters())
        if trained and not torch.is_grad_enabled():
            raise PipelineError(
                f"{name!r} is called without gradients, and has parameters that are trained. Around a block, activation"
                " checkpointing needs `use_reentrant=False`. Freeze parameters of blocks that run in `torch.no_grad()`."
            )
        if run.trains and number == run.own.stop - 1 and not run.is_last:
            _refuse_backward_hooks(name, (args, kwargs))
        run.seed(2 * number + 1)
        output = forward(*args, **kwargs)
        if self._sharded is None:
            self._end(number, None, None, output)
        return output

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        named = self._module.named_parameters()
        kept = ((name, one) for name, one in named if not one.requires_grad and has_memory(one))
        return ((name, one) for name, one in kept if not one.is_inference())

    def _outer_values(self) -> list[tuple[Tensor, Tensor]]:
        return [(buffer, buffer.clone()) for buffer in self._outer_buffers]

    def _call_again(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block outside of a step, or in its backward, as activation checkpointing does."""
        run = self._again
        if run is None:
            return forward(*args, **kwargs)
        if number < run.own.start:
            output = run.returned(number)
        else:
            run.seed(2 * number + 1)
            output = forward(*args, **kwargs)
        run.seed(2 * number + 2)
        return output

    def _without_values(self, key: tuple[int, bool], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a block without values, and finds which of its arguments it changes in place."""
        args, kwargs = without_values(args), without_values(kwargs)
        parts = [*_parts((args, kwargs))]
        before = [_content(part) for part in parts]
        # With the tensors, so that no other gets the identity of one that is gone.
        known = {id(one): one for one in tensors_within((args, kwargs))}
        # cuDNN's recurrent layers take the memory of weights, also of those that have none.
        with torch.backends.cudnn.flags(enabled=False):
            output = forward(*args, **kwargs)
        changed = [place for place, part in enumerate(parts) if _has_changed(part, before[place])]
        self._changed[key] = changed
        kept = [one for one in tensors_within((args, kwargs)) if id(one) not in known]
        # Other tensors that a block changes in place, it usually computes with.
        kept += [parts[place] for place in changed if isinstance(parts[place], Tensor) and parts[place].numel() == 1]
        returned = {id(leaf.tensor) for leaf in leaves(output)}
        if any(one.grad_fn is not None and id(one) not in returned for one in kept):
            raise PipelineError(
                f"{self._names[key[0]]!r} leaves a tensor with a gradient in its arguments, such as an auxiliary loss."
                f" {_NOT_SEEN}"
            )
        return output

    def _end(self, number: int, _: Any, __: Any, output: Any) -> None:
        """Runs after a block."""
        run = self._run
        if run is None or self._note is not None or number < run.own.start:
            return
        if number == run.own.stop - 1 and not run.is_last:
            raise _Cut(output)
        run.seed(2 * number + 2)

    def _refuse_without_values(self, tree: Any, what: str) -> None:
        if any(isinstance(tensor, FakeTensor) for _, tensor in leaves(tree)):
            raise PipelineError(
                f"{what[0].upper()}{what[1:]} depends on what another stage computes: on the output of an earlier block"
                f" (blocks are {listed(self._names)}). Or it depends on a parameter that this rank gave no gradient in"
                " the first step, as under `torch.no_grad()`. A stage gets the output of the block before it, and"
                " nothing else. Pass on what later blocks need through the blocks. If blocks are wrong, name their"
                " classes by `auto_wrap_policy`. Or take a strategy that keeps the module whole."
            )

    def _compare(self, output: Any, expected: Any, name: str) -> None:
        shown = [[(tuple(one.shape), one.dtype) for _, one in leaves(tree)] for tree in (output, expected)]
        if shown[0] != shown[1]:
            raise PipelineError(
                f"{name!r} has returned tensors of {shown[0]}. From the shapes of its batch, {shown[1]} follows."
                " The shapes that a block returns must not depend on values, on the epoch or on an attribute. Cut"
                " batches in the loader's `collate_fn`."
            )
        if not _are_equal(_numbers(output), _numbers(expected)):
            raise PipelineError(
                f"{name!r} has returned the numbers {_numbers(output)}, and {_numbers(expected)} for the first batch of"
                " this shape. The next stage gets tensors alone: return a tensor for what changes."
            )


def _refuse_backward_hooks(name: str, given: Any) -> None:
    # The output leaves the step within the block's call, before torch registers the hooks on it.
    if any(type(leaf.tensor.grad_fn).__name__ == "BackwardHookFunctionBackward" for leaf in leaves(given)):
        raise PipelineError(
            f"A backward hook is registered on {name!r}, or on what computes its input. It would not run in the last"
            " block of a stage. Register it on modules within blocks, on tensors or on parameters."
        )


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type, Enum, dict))


def _numbers(tree: Any) -> list[Any]:
    """The numbers, and texts, in what a block returns, also in attributes of its objects."""
    if tree is None or isinstance(tree, _SIMPLE):
        return [tree]
    if _is_object(tree):
        return [value for value in vars(tree).values() if isinstance(value, _SIMPLE)]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [number for part in parts for number in _numbers(part)]


_SIMPLE = (bool, int, float, str, Enum, np.generic)


def _fresh(tree: Any) -> Any:
    """A copy of a tree with the same tensors. Of its objects, the attributes are the same."""
    if isinstance(tree, tuple):
        items = map(_fresh, tree)
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, (dict, list, deque)):
        made = copy.copy(tree)
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            made[key] = _fresh(value)
        return made
    with suppress(Exception):
        return copy.copy(tree) if _is_object(tree) else tree
    return tree


def _tensor_of(part: Any) -> str:
    """The name of an object's attribute that is a tensor. Empty if there is none."""
    own = vars(part).items() if _is_object(part) else ()
    return next((f"{type(part).__name__}.{name}" for name, value in own if isinstance(value, Tensor)), "")


def _are_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    # NaN is like NaN.
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(one == other or (one != one and other != other) for one, other in pairs)


def _parts(tree: Any) -> Iterator[Any]:
    """The tensors, dictionaries, lists and objects of a tree."""
    if isinstance(tree, (Tensor, dict, list)) or _is_object(tree):
        yield tree
    if isinstance(tree, (dict, list, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _parts(part)


def _content(part: Any) -> tuple[int, list[Any]]:
    """The version and the contents, which a change in place changes."""
    if isinstance(part, Tensor):
        return 0 if part.is_inference() else version_of(part), []
    if isinstance(part, (dict, list)):
        return len(part), [*part.values()] if isinstance(part, dict) else part.copy()
    # What else an object has, such as a cache of keys, no other stage may need.
    return 0, _numbers(part)


def _has_changed(part: Any, before: tuple[int, list[Any]]) -> bool:
    number, values = _content(part)
    if _is_object(part):
        # New attributes, such as notes, follow those that were there.
        return not _are_equal(values[: len(before[1])], before[1])
    return number != before[0] or any(one is not other for one, other in zip(values, before[1], strict=True))


def _not_a_leaf(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.requires_grad else tensor


@torch.no_grad()
def _copy_back(tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in tensors:
        # By `data`: graphs of other micro-batches hold it, and would take it for changed.
        tensor.data.copy_(before)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes with copies of their dictionaries, lists and tensors, which code changes in place."""
    copied: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, (dict, list)):
            copied[name] = value, copy.copy(value)
        elif isinstance(value, Tensor) and value.grad_fn is None and not isinstance(value, FakeTensor):
            copied[name] = value, value.detach().clone()
        else:
            copied[name] = value, None
    return copied


@contextmanager
def _restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Attributes of modules are as before when it ends. Buffers that were changed in place stay changed."""
    kept = [(vars(part), _copied(vars(part))) for part in modules]
    try:
        yield
    finally:
        for attributes, values in kept:
            _restore(attributes, values)


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, (value, content) in before.items():
        attributes[name] = value
        if isinstance(value, dict):
            value.clear()
            value.update(content)
        elif isinstance(value, list):
            value[:] = content
        elif content is not None:
            _copy_back([(value, content)])


@contextmanager
def _no_values(name: str) -> Any:
    try:
        yield
    except (_Cut, PipelineError):
        raise
    except Exception as error:
        raise PipelineError(
            f"The shapes that {name!r} returns cannot be found without values: {type(error).__name__}: {error}\n"
            "In blocks, decide by shapes, not by values. In nn.TransformerEncoder, set `enable_nested_tensor=False`. In"
            " Hugging Face's mixtures of experts on CPUs, set `experts_implementation='batched_mm'`."
        ) from error


def tensors_within(tree: Any, in_object: bool = False, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors of a tree, and those of one element in attributes of its objects, such as losses.

    An object may also be a cache of keys and values, which no other stage needs.
    """
    # By identity: a list may hold itself.
    seen = set() if seen is None else seen
    if isinstance(tree, Tensor):
        yield from [tree] if tree.numel() == 1 or not in_object else []
    elif isinstance(tree, (dict, list, tuple, set, deque)) and id(tree) not in seen:
        seen.add(id(tree))
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_within(part, in_object, seen)
    elif not in_object and hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type)):
        yield from tensors_within(vars(tree), True, seen)


def left_tensors(blocks: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Tensors that blocks have left on their modules, by their places: other stages do not see them."""
    return {
        f"{name}.{attribute}" + (f", {number}" if number else ""): tensor
        for block, root in blocks.items()
        for name, part in root.named_modules(prefix=block)
        for attribute, value in vars(part).items()
        if not attribute.startswith("_")
        # Older weight norms and pruning compute such a weight in each forward.
        and not (hasattr(part, f"{attribute}_orig") or hasattr(part, f"{attribute}_v"))
        for number, tensor in enumerate(tensors_within(value))
    }


def fault_of_left(left: dict[str, Tensor]) -> PipelineError | None:
    """The error for a tensor that needs a gradient. None if there is none."""
    for place, tensor in left.items():
        if tensor.grad_fn is not None:
            return PipelineError(
                f"A forward leaves a tensor with a gradient in {place!r}, such as an auxiliary loss. {_NOT_SEEN}"
            )
    return None
