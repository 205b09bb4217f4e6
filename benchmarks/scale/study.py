"""Steps of zero1_custom and DDP at 2 to 1,024 GPUs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.scale import constants
from benchmarks.scale.networks import Gloo, Nccl, Network, Placement, ShardGroups, placed
from benchmarks.scale.simulator import Machine, Step, accelerator, steady_step
from benchmarks.scale.synthetic import MIB, Model, Replan, ddp_record, sharded_plan, zero1_record
