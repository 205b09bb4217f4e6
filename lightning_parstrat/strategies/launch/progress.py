"""How far a Trainer has come, read by a thread while it runs: no step notes anything for it."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_parstrat.strategies.lightning_compat import current_hook, trainer_of


def progress_of(module: LightningModule | None) -> tuple[str, str]:
    """How far a module's Trainer has come, and which of Lightning's hooks it is calling; not collective.

    Some microseconds, in any thread: it reads what Lightning counts anyway.

    Args:
        module: The module; None before one is connected.

    Returns:
        Two texts, such as "step 812, epoch 3, batch 12" and "training_step", each empty where there is none.
    """
    trainer = trainer_of(module)
    if module is None or trainer is None or trainer.state.stage is None:
        return "", ""
    return _position(trainer, trainer.state.stage), current_hook(module)


def _position(trainer: Trainer, stage: RunningStage) -> str:
    fits = trainer.state.fn == TrainerFn.FITTING
    step = f"step {trainer.global_step}, epoch {trainer.current_epoch}" if fits else ""
    if stage == RunningStage.TRAINING:
        return f"{step}, batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready}"
    loops = {
        RunningStage.SANITY_CHECKING: trainer.fit_loop.epoch_loop.val_loop,
        RunningStage.VALIDATING: trainer.fit_loop.epoch_loop.val_loop if fits else trainer.validate_loop,
        RunningStage.TESTING: trainer.test_loop,
        RunningStage.PREDICTING: trainer.predict_loop,
    }
    batch = f"batch {loops[stage].batch_progress.current.ready} of {stage.value}"
    return f"{batch}, {step}".rstrip(", ")
