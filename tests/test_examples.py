"""The examples, run as their reader would run them."""

import json
from pathlib import Path

import pytest

from tests.comparing import worst
from tests.scripts import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
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


def test_accumulating_over_lines_of_all_lengths(tmp_path: Path) -> None:
    output = tmp_path / "runs" / "accumulation"
    result = run_python([EXAMPLES / "accumulation/main.py", "--epochs", "2", "--output", output], tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(output.with_suffix(".json").read_text())["deviations"]
    for strategy in ("ddp_tuned", "zero1_custom"):
        assert worst(found[strategy]["norm"], found[strategy]["parameters"]) < 1e-5
    assert max(found["ddp"]["norm"]) > 0.1
    assert output.with_suffix(".png").stat().st_size > 10_000


def test_the_language_model_trains_with_each_configuration(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EVERY_CONFIG)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    done = run_python((*torchrun, *CONFIGS), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(CONFIGS) >= 8 and (done.stdout + done.stderr).count("`max_steps=2` reached") == len(CONFIGS)
    # Its two blocks, by name: they are too small to be found.
    assert "zero3_custom: gathers 2 units in turn" in done.stderr
