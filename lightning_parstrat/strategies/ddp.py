"""``ddp_tuned``: torch DDP with a measured choice of bucket sizes."""

import os
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.tuning import MEASURES, CapsInMiB, TuningPolicy, TuningReport
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.ddp.bucket_tuner import BucketTuner
from lightning_parstrat.distributed.ddp.reducers import CommHook, reason_to_keep, register_comm_hook
from lightning_parstrat.distributed.ddp.trained_parameters import TrainedParameters
from lightning_parstrat.distributed.torch_compat import check_reducer_finalized, is_compiled, multiply_all, remove_hooks
from lightning_parstrat.strategies.base import ComposedStrategy
from lightning_parstrat.strategies.lightning_compat import trained
from lightning_parstrat.strategies.report import line_of_training


class TunedDDPStrategy(ComposedStrategy):
    """Trains with torch's DistributedDataParallel, and finds the fastest size of buckets by measuring.

    Gradients are views into the buckets, which saves one copy of them.

    On two ranks, results equal those of ``ddp`` to the last bit. On more ranks, they differ by the order in which sums
    are rounded. In "bf16-true" with clipping by norm they are better, because the norm is taken in fp32. Parameters may
    be frozen, unfrozen, added or removed in training: they are averaged correctly, which ``ddp`` does not do. If ranks
    train different parameters, the training raises. That takes a message of 34 bytes per step.

    Args:
        bucket_cap_mb: The size of buckets. ``"auto"`` tries sizes during the first steps, alternating with torch's
            default, and keeps the fastest. :attr:`tuning_report` has the result. A number of MiB (2**20 bytes) is the
            size of all buckets. A list has one size for each bucket, in the order in which torch makes them. That is
            the order of sending, or with ``find_unused_parameters`` the reverse of it.
        tune_steps: How many steps are measured to compare two sizes. Half of them run with each size. The tuning takes
            about six times as many.
        tune_tolerance: The smallest gain for which buckets are changed. It is a share of a forward and backward.
        plan_cache: A folder that keeps the results of tuning. Later trainings of the same kind take the kept result. By
            default nothing is kept.
        comm_hook: A compression of gradients on the network: ``"bf16"`` and ``"fp16"`` halve the bytes. Unlike in
            Lightning, it is registered on every device, and so is a ``ddp_comm_hook``.
        gradient_as_bucket_view: Whether ``param.grad`` is a view into DDP's bucket, which saves one copy of all
            gradients. torch's own default is False.
        **kwargs: Every further argument of :class:`~lightning.pytorch.strategies.DDPStrategy` and of
            :class:`~torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ValueError: A value is not allowed. The message lists the allowed ones.
    """

    flag = "ddp_tuned"
    _of_one_training = frozenset({"_trained", "_tuner"})

    def __init__(
        self,
        bucket_cap_mb: CapsInMiB = "auto",
        tune_steps: int = 10,
        tune_tolerance: float = 0.01,
        plan_cache: str | Path | None = None,
        comm_hook: CommHook = None,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        self._tuning = TuningPolicy(bucket_cap_mb=bucket_cap_mb, tune_steps=tune_steps, tune_tolerance=tune_tolerance)
        if plan_cache is not None and not isinstance(plan_cache, (str, PathLike)):
            raise ValueError(f"Invalid plan_cache: {plan_cache!r}. Must be a folder's path, or None.")
        self._plan_cache = plan_cache
        allowed = get_args(get_args(CommHook)[0])
        if comm_hook is not None and comm_hook not in allowed:
            raise ValueError(f"Invalid comm_hook: {comm_hook!r}. Must be one of {allowed}, or None.")
        if comm_hook is not None and kwargs.get("ddp_comm_hook") is not None:
            raise ValueError(f"comm_hook={comm_hook!r} and ddp_comm_hook were both given. Give one of them.")
        if kwargs.get("bucket_cap_mb_list") is None:
            # A command line passes every argument, also those at None.
            kwargs.pop("bucket_cap_mb_list", None)
        elif bucket_cap_mb != "auto":
            raise ValueError(
                f"bucket_cap_mb={bucket_cap_mb!r} and bucket_cap_mb_list were both given. Give one of them."
            )
        self._comm_hook = comm_hook
        self._users_hook, self._users_hook_state, self._wraps_hook = (
            kwargs.get(name) for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")
        )
        self._gradient_as_bucket_view = gradient_as_bucket_view
        self._tuner: BucketTuner | None = None
        self._report: TuningReport | None = None
        self._trained: TrainedParameters | None = None
        super().__init__(**_bucket_arguments(bucket_cap_mb), **kwargs)

    @property
    def tuning_report(self) -> TuningReport | None:
        """The result of tuning in this training, or else in the last. None if the tuning did not end.

        The log has one line of it. ``print(strategy.tuning_report)`` shows the rest.
        """
        return self._report

    @override
    def configure_ddp(self) -> None:
        """Wraps the module, and begins the tuning."""
        # Not in `__init__`: until here `_ddp_kwargs` shows the arguments that the user has given.
        self._ddp_kwargs["gradient_as_bucket_view"] = self._gradient_as_bucket_view
        super().configure_ddp()
        self._trained = TrainedParameters(
            self._ddp, None if self._has_hooks_of_users else self._wrap, self._ranks.messages
        )
        self._begin_with_reducer(self._trained.sent)

    def _begin_with_reducer(self, sent: Mapping[Tensor, bool]) -> None:
        # Lightning sends a static graph's first gradients itself, once in a reducer's life.
        self._pl_static_graph_delay_done = False
        self._report = self._tuner = None
        # `lightning-parstrat tune` takes fewer steps than the sizes need.
        if self._tuning.bucket_cap_mb != "auto" or self.world_size == 1 or MEASURES in os.environ:
            return
        reason = self._reason_not_to_tune(sent)
        if reason is not None:
            self._end_tuning(TuningReport(verdict="not tuned", reason=reason))
            return
        self._tuner = BucketTuner(
            self._ddp,
            sent,
            self._wrap,
            self._tuning,
            self._ranks.control,
            self.root_device,
            None if self._plan_cache is None else self._file_of(self._plan_cache, sent),
            lambda message: rank_zero_warn(f"{self.flag}: {message}"),
        )

    def _reason_not_to_tune(self, sent: Mapping[Tensor, bool]) -> str | None:
        """The reason why the buckets are not tuned although ``"auto"`` asks for it. None if they are tuned."""
        if self._has_hooks_of_users:
            return "what the communication hook keeps belongs to buckets as they are"
        if self._ddp.static_graph and not self.lightning_module.automatic_optimization:
            return "static_graph and manual optimization do not go together with other buckets than the first"
        if is_compiled(self.lightning_module):
            return "torch.compile has cut the graph at the ends of the default's buckets"
        # The sum of two numbers does not depend on their order.
        if torch.are_deterministic_algorithms_enabled() and self.world_size > 2:
            return "deterministic algorithms were asked for, and with more than two ranks buckets decide how sums round"
        if "bucket_cap_mb_list" in self._ddp_kwargs:
            return "`bucket_cap_mb_list` was given"
        if any(sent.values()):
            return "there are sparse gradients, which travel by themselves"
        if len(sent) < 2:
            return "there are fewer than two parameters"
        return reason_to_keep(self._ddp)

    def _file_of(self, folder: str | Path, sent: Collection[Tensor]) -> Path:
        """The file of all trainings of this kind. The name depends on everything that the best size depends on."""
        cuda, arguments = self.root_device.type == "cuda", self._ddp_kwargs
        kind = (
            [
                (name, tuple(parameter.shape), str(parameter.dtype), parameter in sent)
                for name, parameter in self.lightning_module.named_parameters()
            ],
            # The `repr` of other values may have an address: the name of their type stands for them.
            [(k, v if isinstance(v, (int, float, str)) else type(v).__name__) for k, v in sorted(arguments.items())],
            self._comm_hook,
            str(self.precision_plugin.precision),
            (self.world_size, self.num_nodes),
            torch.cuda.get_device_name(self.root_device) if cuda else self.root_device.type,
            self.process_group_backend,
            (torch.__version__, torch.version.cuda, lightning_version),
        )
        return Path(folder).expanduser() / f"plan-{digest(kind):x}.json"

    def _end_tuning(self, report: TuningReport) -> None:
        self._tuner, self._report = None, report
        rank_zero_info(f"{self.flag}: {report.headline}")

    @property
    def _ddp(self) -> DistributedDataParallel:
        return self.model

    @property
    def _has_hooks_of_users(self) -> bool:
        """Whether the user's own code sends gradients. Such code may keep something of each bucket."""
        return self._users_hook is not None or self._ddp_kwargs.get("param_to_hook_all_reduce") is not None

    def _wrap(self, size: int | None) -> DistributedDataParallel:
        """Wraps the module again, in buckets of ``size`` bytes. Not collective."""
        arguments = {**self._ddp_kwargs, "init_sync": False}
        if size is not None:
            arguments["bucket_cap_mb"] = size / 2**20
        ddp = DistributedDataParallel(self.lightning_module, device_ids=self.determine_ddp_device_ids(), **arguments)
        if self._comm_hook is not None:
            register_comm_hook(ddp, self._comm_hook)
        return ddp

    @override
    def _register_ddp_hooks(self) -> None:
        """Registers communication hooks on every device. Lightning leaves them out on CPUs, without a warning."""
        if self._comm_hook is not None:
            register_comm_hook(self._ddp, self._comm_hook)
        elif self._users_hook is not None:
            hook = self._users_hook if self._wraps_hook is None else self._wraps_hook(self._users_hook)
            self._ddp.register_comm_hook(self._users_hook_state, hook)

    @override
    def on_train_start(self) -> None:
        """Logs the memory of a rank."""
        super().on_train_start()
        parameters = list(self.lightning_module.parameters())
        self._fit_report.say(line_of_training(parameters, trained(self.optimizers), self.world_size))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Changes buckets between steps if a change is due, then runs the user's training step."""
        # At the begin of a window, because a reducer records the parameters used in it. A static graph's reducer must
        # send in its first backward.
        if not (self._accumulation.accumulates and self._ddp.static_graph):
            if self._trained.begin_forward():
                rank_zero_info(f"{self.flag}: other parameters are trained than before: DDP's reducer was rebuilt")
                self._begin_with_reducer(self._trained.sent)
            report = None if self._tuner is None else self._tuner.begin_forward()
            if report is not None:
                self._end_tuning(report)
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Reads the clock, and compares the trained parameters."""
        # Outside of `fit` a step may run a backward by hand, and the module has no wrapper.
        sends = (
            self._trained is not None and not self._accumulation.accumulates and self._ddp.require_backward_grad_sync
        )
        if self._tuner is not None and sends:
            self._tuner.begin_backward()
        super().pre_backward(closure_loss)
        if self._trained is not None:
            self._trained.begin_backward(closure_loss, sends)

    @override
    def _end_backward(self, ends_window: bool, has_run: bool) -> None:
        """Multiplies all gradients if their mean over ranks is not the window's: one pass, in those steps alone."""
        if not ends_window:
            return
        if self._tuner is not None:
            self._tuner.end_backward()
        if self._trained is not None:
            self._trained.end_backward()
        factor = self._accumulation.factor_of_mean
        gradients = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
        if gradients and factor != 1.0:
            multiply_all(gradients, factor)

    @override
    def on_train_end(self) -> None:
        """Checks which parameters the ranks have trained in the last step.

        Raises:
            DifferentParametersError: The ranks have trained different parameters.
            RuntimeError: DDP waits for gradients of parameters that were not used.
        """
        super().on_train_end()
        check_reducer_finalized(self._ddp)
        self._trained.settle()

    @override
    def teardown(self) -> None:
        """Stops the tuning, finished or not."""
        self._tuner = None
        if self._trained is not None:
            self._trained.close()
            self._trained = None
        if isinstance(self.model, DistributedDataParallel):
            remove_hooks(self.model)
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Names the parameters that were not used, and the flag of this strategy that finds them."""
        said, *rest = exception.args or ("",)
        if isinstance(said, str) and "Expected to have finished reduction in the prior iteration" in said:
            unused = [] if self._trained is None else self._trained.names_without_gradient()
            named = f" On rank {self.global_rank} these have no gradient: {listed(unused)}." if unused else ""
            # Instead of Lightning's text, which would name a flag of another strategy.
            advice = (
                "Some parameters were not used for the loss that `training_step` returned, or the program has caught an"
                f" exception in a backward. DDP waits for them.{named} If it is intended that they are not used, take"
                f" `strategy='{self.flag}_find_unused_parameters_true'`, or"
                f" `strategy={type(self).__name__}(find_unused_parameters=True)`. After an exception, let it end the"
                " training, or take `strategy='zero1_custom'`."
            )
            exception.args = (advice, *rest)
        super().on_exception(exception)


def _bucket_arguments(bucket_cap_mb: CapsInMiB) -> dict[str, Any]:
    """The arguments by which DDP makes buckets of these sizes."""
    if bucket_cap_mb == "auto":
        return {}
    if isinstance(bucket_cap_mb, (list, tuple)):
        return {"bucket_cap_mb_list": list(bucket_cap_mb)}
    return {"bucket_cap_mb": bucket_cap_mb}
