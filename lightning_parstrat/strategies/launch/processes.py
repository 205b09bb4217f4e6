"""Processes, samplers and devices as Lightning's DDP has them."""

from datetime import timedelta
from typing import Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy


class ProcessStrategy(DDPStrategy):
    """DDP's processes, samplers and devices, without the arguments of torch's DDP wrapper.

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: How ranks find each other; by default detected.
        checkpoint_io: How checkpoint files are written.
        precision_plugin: Set by the Trainer's ``precision``.
        process_group_backend: Backend of the process group, such as ``"nccl"`` or ``"gloo"``; by default the one that
            suits the device.
        timeout: How long a collective may take before the run ends with an error.
        start_method: How the processes are launched.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
