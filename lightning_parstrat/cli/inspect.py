"""``lightning-parstrat inspect``: shows the content of a checkpoint."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_parstrat._namespaces import package_in_use
from lightning_parstrat.cli.consolidate import add_trust, loaded, open_sharded
from lightning_parstrat.cli.text import UsageError, table
from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.core.wording import amount, counted
from lightning_parstrat.distributed.checkpoint.folder import is_sharded_checkpoint

# Of the two packages that Lightning is published as, only one may be installed.
checkpoint_io = import_module(f"{package_in_use()}.strategies.checkpoint.checkpoint_io")

_DESCRIPTION = """
Shows what is in a checkpoint of Lightning, a file or a folder, without reading the tensors.

  lightning-parstrat inspect checkpoints/last.ckpt
"""
_SHOWN = 20


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    parser.add_argument("checkpoint", type=str, metavar="CKPT", help="the file or folder")
    parser.add_argument("--all", action="store_true", help=f"show all parameters, not the {_SHOWN} largest")
    add_trust(parser)
    return parser


def run(arguments: Namespace) -> int:
    """Prints the content of the checkpoint. See :func:`main`."""
    path = Path(arguments.checkpoint)
    if not path.exists():
        raise UsageError(f"There is no {path}.")
    checkpoint = _read(path, arguments.trusted)
    tensors = {key: value for key, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    print("\n".join([*_origin(path, checkpoint), *_states(checkpoint, tensors)]))
    shown = sorted(tensors.items(), key=lambda one: -one[1].nbytes)[: None if arguments.all else _SHOWN]
    rows = [
        (name, "x".join(map(str, one.shape)) or "()", str(one.dtype).removeprefix("torch."), amount(one.nbytes))
        for name, one in shown
    ]
    print("", table([("tensor", "shape", "dtype", "size"), *rows]), sep="\n")
    if len(shown) < len(tensors):
        print(f"and {counted(len(tensors) - len(shown), 'smaller one')}: --all shows all")
    return 0


def _read(path: Path, trusted: bool) -> dict[str, Any]:
    try:
        if is_sharded_checkpoint(path):
            checkpoint = open_sharded(path, trusted).skeleton
        else:
            io = checkpoint_io.DurableCheckpointIO()
            checkpoint = loaded(lambda: io.load_checkpoint(path, weights_only=not trusted), path)
        checkpoint_io.check_readable(checkpoint, path)
    except checkpoint_io.MisconfigurationException as error:
        raise UsageError(str(error)) from error
    return checkpoint


def _origin(path: Path, checkpoint: dict[str, Any]) -> Iterator[str]:
    """The origin of the checkpoint."""
    own = checkpoint.get(checkpoint_io.CHECKPOINT_KEY, {})
    files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
    kind, size = "sharded" if path.is_dir() else "full", amount(sum(one.stat().st_size for one in files))
    yield f"{path}: {kind}, {size} in {counted(len(files), 'file')}"
    step, epoch = checkpoint.get("global_step"), checkpoint.get("epoch")
    yield f"saved after step {step}, in epoch {epoch}, by Lightning {checkpoint['pytorch-lightning_version']}"
    if checkpoint_io.RESUME in own:
        buckets = f", {counted(len(own['bucket_plan']), 'bucket')}" if own.get("bucket_plan") else ""
        job = f", Slurm job {own['slurm_job']}" if own.get("slurm_job") else ""
        yield f"by {counted(len(own[checkpoint_io.RESUME]['ranks']), 'rank')} with different data{buckets}{job}"


def _states(checkpoint: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[str]:
    """The parts of the training's state and their sizes."""
    yield f"weights: {counted(len(tensors), 'tensor')}, {amount(sum(one.nbytes for one in tensors.values()))}"
    yield f"schedulers: {len(checkpoint.get('lr_schedulers', []))}"
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        groups = ", ".join(
            f"{counted(len(group['params']), 'parameter')} at lr {_plain(group.get('lr'))}"
            for group in optimizer["param_groups"]
        )
        entries = ", ".join(
            f"{key} ({len(sizes)} x, {amount(sum(sizes))})" for key, sizes in _entries(optimizer).items()
        )
        yield f"optimizer {number}: {groups}; state: {entries or 'none'}"
    yield f"callbacks: {', '.join(checkpoint.get('callbacks', {})) or 'none'}"
    yield f"keys: {', '.join(checkpoint)}"


def _entries(optimizer: dict[str, Any]) -> dict[str, list[int]]:
    """The bytes of an optimizer's tensors, by the name of the entry."""
    entries: dict[str, list[int]] = {}
    others = {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")}
    # Beside torch's two entries there may be others, such as fp32 master weights. These count as state, too.
    for state in (*optimizer["state"].values(), *({key: value} for key, value in others.items())):
        for key, value in state.items() if isinstance(state, dict) else ():
            entries.setdefault(str(key), []).extend(leaf.tensor.nbytes for leaf in leaves(value))
    return entries


def _plain(value: Any) -> Any:
    # A learning rate may be a tensor. In a sharded checkpoint it may be a tensor without elements.
    return value.item() if isinstance(value, Tensor) and value.device.type != "meta" else value
