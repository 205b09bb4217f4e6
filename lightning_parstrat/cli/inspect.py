"""``lightning-parstrat inspect``: shows the content of a checkpoint."""

import json
from argparse import ArgumentParser, Namespace
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
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_trust(parser)
    return parser


def run(arguments: Namespace) -> int:
    """Prints the content of the checkpoint. See :func:`main`."""
    path = Path(arguments.checkpoint)
    if not path.exists():
        raise UsageError(f"There is no {path}.")
    found = _found(path, arguments.trusted)
    print(json.dumps(found, indent=2) if arguments.json else _as_text(found, arguments.all))
    return 0


def _found(path: Path, trusted: bool) -> dict[str, Any]:
    sharded = is_sharded_checkpoint(path)
    try:
        if sharded:
            checkpoint = open_sharded(path, trusted).skeleton
        else:
            io = checkpoint_io.DurableCheckpointIO()
            checkpoint = loaded(lambda: io.load_checkpoint(path, weights_only=not trusted), path)
        checkpoint_io.check_readable(checkpoint, path)
    except checkpoint_io.MisconfigurationException as error:
        raise UsageError(str(error)) from error
    own = checkpoint.get(checkpoint_io.CHECKPOINT_KEY, {})
    files = sorted(one for one in path.iterdir() if one.is_file()) if sharded else [path]
    return {
        "path": str(path),
        "format": "sharded" if sharded else "full",
        "files": {one.name: one.stat().st_size for one in files},
        "lightning": checkpoint["pytorch-lightning_version"],
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step"),
        "ranks": len(own.get(checkpoint_io.RESUME, {"ranks": []})["ranks"]),
        "buckets": len(own.get("bucket_plan", [])) or None,
        "slurm_job": own.get("slurm_job"),
        "keys": list(checkpoint),
        "parameters": [
            {
                "name": name,
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "bytes": value.nbytes,
            }
            for name, value in checkpoint["state_dict"].items()
            if isinstance(value, Tensor)
        ],
        "optimizers": [_optimizer(state) for state in checkpoint.get("optimizer_states", [])],
        "schedulers": len(checkpoint.get("lr_schedulers", [])),
        "callbacks": list(checkpoint.get("callbacks", {})),
    }


def _optimizer(state_dict: dict[str, Any]) -> dict[str, Any]:
    entries: dict[str, list[Tensor]] = {}
    others = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    # Beside torch's two entries there may be others, such as fp32 master weights. These count as state, too.
    for state in (*state_dict["state"].values(), *({key: v} for key, v in others.items())):
        for key, value in state.items() if isinstance(state, dict) else ():
            entries.setdefault(str(key), []).extend(leaf.tensor for leaf in leaves(value))
    groups = state_dict["param_groups"]
    return {
        "groups": [{"parameters": len(group["params"]), "lr": _plain(group.get("lr"))} for group in groups],
        "entries": {
            key: {"count": len(tensors), "nbytes": sum(tensor.nbytes for tensor in tensors)}
            for key, tensors in entries.items()
        },
    }


def _plain(value: Any) -> Any:
    # A learning rate may be a tensor. In a sharded checkpoint it may be a tensor without elements.
    return value.item() if isinstance(value, Tensor) and value.device.type != "meta" else value


def _as_text(found: dict[str, Any], show_all: bool) -> str:
    parameters = found["parameters"]
    nbytes = sum(one["bytes"] for one in parameters)
    of_state = sum(entry["nbytes"] for one in found["optimizers"] for entry in one["entries"].values())
    files = counted(len(found["files"]), "file")
    lines = [
        f"{found['path']}: {found['format']}, {amount(sum(found['files'].values()))} in {files}",
        f"saved after step {found['global_step']}, in epoch {found['epoch']}, by Lightning {found['lightning']}",
    ]
    if found["ranks"]:
        buckets = f", {counted(found['buckets'], 'bucket')}" if found["buckets"] else ""
        job = f", Slurm job {found['slurm_job']}" if found["slurm_job"] else ""
        lines.append(f"by {counted(found['ranks'], 'rank')}{buckets}{job}")
    lines += [
        f"weights: {counted(len(parameters), 'tensor')}, {amount(nbytes)}",
        f"optimizers: {len(found['optimizers'])}, {amount(of_state)} of state; schedulers: {found['schedulers']}",
    ]
    for number, optimizer in enumerate(found["optimizers"]):
        groups = ", ".join(
            f"{counted(group['parameters'], 'parameter')} at lr {group['lr']}" for group in optimizer["groups"]
        )
        entries = ", ".join(
            f"{key} ({entry['count']} x, {amount(entry['nbytes'])})" for key, entry in optimizer["entries"].items()
        )
        lines.append(f"  {number}: {groups}; state: {entries or 'none'}")
    lines += [f"callbacks: {', '.join(found['callbacks']) or 'none'}", f"keys: {', '.join(found['keys'])}", ""]
    shown = parameters if show_all else sorted(parameters, key=lambda one: -one["bytes"])[:_SHOWN]
    rows = [
        [one["name"], "x".join(map(str, one["shape"])) or "()", one["dtype"], amount(one["bytes"])] for one in shown
    ]
    lines.append(table([["tensor", "shape", "dtype", "size"], *rows]))
    if len(shown) < len(parameters):
        lines.append(f"and {counted(len(parameters) - len(shown), 'smaller one')}: --all shows all")
    return "\n".join(lines)
