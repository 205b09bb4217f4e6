"""On a GPU by NCCL: two ranks, each as a node of its own, which may share one GPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAM = '''
import sys
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_parstrat import ZeRO1Strategy

WIDTH = 512


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def training_step(self, batch, batch_idx):
        # Made on the device: a copy to it would be the loader's wait, not the strategy's.
        generator = torch.Generator(self.device).manual_seed(100 * batch_idx + self.global_rank)
        inputs = torch.randn(16, WIDTH, device=self.device, generator=generator)
        return (self.layers(inputs) - inputs).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)


def refusing(function):
    def refuse(*tensors, **arguments):
        # What lies on the host, as an optimizer's count of steps does, is not waited for.
        if not tensors or tensors[0].is_cuda:
            raise AssertionError("the host waited for the device")
        return function(*tensors, **arguments)
    return refuse


class Watch(Callback):
    """No step but the first few, which plan, may make the host wait for the device."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5:
            self.kept = torch.cuda.synchronize, torch.Tensor.item, torch.Tensor.cpu
            torch.cuda.synchronize, torch.Tensor.item, torch.Tensor.cpu = map(refusing, self.kept)
            torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, trainer, module):
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize, torch.Tensor.item, torch.Tensor.cpu = self.kept


class Memory(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        held = torch.cuda.memory_allocated() - BEFORE
        expected = trainer.strategy._engine.held_bytes().total
        if batch_idx >= 5:
            assert abs(held - expected) <= 0.03 * expected, (held, expected)


def train(strategy, precision, *callbacks):
    torch.manual_seed(0)
    module = Net()
    trainer = Trainer(
        accelerator="gpu", devices=1, num_nodes=2, strategy=strategy, precision=precision, max_steps=10,
        gradient_clip_val=1.0, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(torch.zeros(40, 1), batch_size=2))
    return [parameter.detach().float().cpu() for parameter in module.parameters()]


precision, tolerance = sys.argv[1], float(sys.argv[2])
expected = train("ddp", precision)
torch.cuda.empty_cache()
BEFORE = torch.cuda.memory_allocated()
watches = [Memory()] if precision == "32-true" else []
CHOICES = {}, {"overlap_param_gather": False}, {"bucket_order": "registration"}, {"max_inflight_buckets": 1}
for policy in (*CHOICES, {"shard_group": 1}):
    strategy = ZeRO1Strategy(bucket_cap_mb=2, master_weights="auto" if precision != "bf16-true" else False, **policy)
    found = train(strategy, precision, Watch(), *watches)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
'''


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 1e-3), ("bf16-true", 2e-2)])
def test_a_training_is_ddps_and_no_step_has_the_host_wait(tmp_path: Path, precision: str, tolerance: float) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = str(free_port())
    ranks = []
    for rank in range(2):
        environment = {
            **{"RANK": str(rank), "GROUP_RANK": str(rank), "NODE_RANK": str(rank), "WORLD_SIZE": "2"},
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            # NCCL refuses two ranks of one host on one GPU.
            **{"TORCHELASTIC_RUN_ID": "test", "NCCL_HOSTID": f"node{rank}"},
            "CUDA_VISIBLE_DEVICES": str(rank % torch.cuda.device_count()),
        }
        command = [sys.executable, str(program), precision, str(tolerance)]
        log = (tmp_path / f"rank{rank}.log").open("w")
        ranks.append(subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], "\n".join((tmp_path / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
