"""Every configuration in examples/configs trains the language model beside the model's own file."""

from pathlib import Path

import pytest

from tests.scripts import run_python

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))
SMALL = (
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.logger=false",
    "--trainer.callbacks=null",
    "--trainer.enable_checkpointing=false",
    "--trainer.num_nodes=1",
    "--trainer.devices=2",
    "--model.width=32",
    "--data.val_windows=8",
)
# One after the other in two processes: starting them takes longer than all trainings.
EVERY_CONFIG = f"""
import sys
sys.path.insert(0, {str(EXAMPLES / "lm")!r})
from main import main

for config in sys.argv[1:]:
    files = ["--config", {str(EXAMPLES / "lm/configs/ddp.yaml")!r}, "--config", config]
    print("configuration", config, flush=True)
    sys.argv = ["main.py", "fit", *files, *{SMALL!r}]
    main()
"""


def test_the_language_model_trains_with_each(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EVERY_CONFIG)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    done = run_python((*torchrun, *CONFIGS), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(CONFIGS) >= 8 and (done.stdout + done.stderr).count("`max_steps=2` reached") == len(CONFIGS)
    # Its two blocks, by name: they are too small to be found.
    assert "zero3_custom: parameters, gradients and optimizer state are sharded over 2 ranks; 2 units" in done.stderr
