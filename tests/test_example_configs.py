"""Every configuration in examples/configs trains the language model beside the model's own file."""

from pathlib import Path

import pytest

from tests.scripts import run_python

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


@pytest.mark.parametrize("config", CONFIGS, ids=[config.stem for config in CONFIGS])
def test_the_language_model_trains_with_it(tmp_path: Path, config: Path) -> None:
    files = ("--config", str(EXAMPLES / "lm/configs/ddp.yaml"), "--config", str(config))
    done = run_python(
        (EXAMPLES / "lm/main.py", "fit", *files, *SMALL, f"--trainer.default_root_dir={tmp_path}"), tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "`max_steps=2` reached" in done.stdout + done.stderr
