"""Estimates for a configuration's module: its bytes, what fits, and what is recommended."""

import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
import yaml
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parstrat.cli.main import main
from lightning_parstrat.cli.text import amount
from lightning_parstrat.core.estimate import Cluster, estimate_ddp, estimate_zero1, estimate_zero3
from lightning_parstrat.core.full_sharding import FullySharded, GatheredUnit
from lightning_parstrat.core.layout import ParameterSpec

WIDTH = 1024
MATRIX = WIDTH * WIDTH


class Planned(LightningModule):
    """Ten matrices, one of them frozen."""

    def __init__(self, width: int, optimizer: str = "AdamW", needs_trainer: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(10))
        self.layers[0].requires_grad_(False)
        self.optimizer = optimizer
        self.needs_trainer = needs_trainer

    def configure_optimizers(self) -> Any:
        if self.needs_trainer:
            print(self.trainer.estimated_stepping_batches)
        optimizer = getattr(torch.optim, self.optimizer)([p for p in self.parameters() if p.requires_grad], lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def write(folder: Path, **init_args: Any) -> str:
    model = {"class_path": f"{__name__}.Planned", "init_args": {"width": WIDTH, **init_args}}
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": "ddp"}, "model": model}))
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def rows(result: dict[str, Any], *wanted: str) -> list[dict[str, Any]]:
    """Of each strategy in ``wanted`` its estimate; in 16 bits where ``/16`` follows its name."""
    found = {one["strategy"] + ("" if one["precision"] == "32-true" else "/16"): one for one in result["estimates"]}
    return [found[name] for name in wanted]


def ddp_of(result: dict[str, Any]) -> dict[str, Any]:
    return rows(result, "ddp_tuned")[0]


def test_bytes_of_each_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--world-size", "16", "--devices-per-node", "8", "--bandwidth", "8Gbit", "--compute-seconds", "0.03")
    result = plan(capsys, 0, "--config", write(tmp_path), *size)
    ddp, zero1, narrow = rows(result, "ddp_tuned", "zero1_custom", "zero1_custom/16")
    count = 9 * MATRIX
    assert ddp["held_bytes"] == 16 * count + 4 * MATRIX
    assert zero1["held_bytes"] == (4 + 12 / 16) * count + 4 * MATRIX
    assert narrow["held_bytes"] == (2 + 16 / 16) * count + 2 * MATRIX
    assert ddp["sent_bytes"] == zero1["sent_bytes"] == 2 * 15 / 16 * 4 * count
    assert narrow["sent_bytes"] == zero1["sent_bytes"] / 2
    # Between two nodes half of each phase's bytes pass a node's link.
    assert zero1["wire_seconds"] == pytest.approx(2 * 4 * count / 2 / 1e9)
    assert ddp["step_seconds"] == pytest.approx(0.03 + ddp["wire_seconds"] - 0.02)
    half = zero1["wire_seconds"] / 2
    assert zero1["step_seconds"] == pytest.approx(0.03 + max(0, half - 0.02) + max(0, half - 0.01))
    assert result["recommended"] == {"strategy": "zero1_custom", "precision": "32-true"}


def test_accumulated_gradients_of_each_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--world-size", "16", "--devices-per-node", "8", "--bandwidth", "8Gbit", "--compute-seconds", "0.3")
    result = plan(capsys, 0, "--config", write(tmp_path), *size, "--accumulate", "3")
    names = ("ddp_tuned", "zero1_custom", "zero1_custom/16", "zero2_custom", "zero2_custom/16")
    ddp, zero1, narrow, zero2, zero2_narrow = rows(result, *names)
    assert len(result["estimates"]) == len(names) + len(("ddp", "zero3_custom", "zero3_custom/16"))
    count, frozen = 9 * MATRIX, 4 * MATRIX
    assert ddp["accumulating_bytes"] == ddp["held_bytes"]
    assert zero1["accumulating_bytes"] == (4 + 8 / 16 + 4) * count + frozen
    assert zero2["accumulating_bytes"] == zero2["held_bytes"] == (4 + 8 / 16 + 4 / 16) * count + frozen
    assert narrow["accumulating_bytes"] == (2 + 12 / 16 + 2) * count + frozen / 2
    assert zero2_narrow["accumulating_bytes"] == (2 + 12 / 16 + 4 / 16) * count + frozen / 2
    # Gradients three times, parameters once, instead of each once.
    assert zero2["sent_bytes"] == 2 * zero1["sent_bytes"] == 2 * ddp["sent_bytes"]
    phase = zero1["wire_seconds"] / 2
    assert zero2["wire_seconds"] == pytest.approx(4 * phase)
    assert zero1["step_seconds"] == pytest.approx(0.3 + max(0, phase - 0.2 / 3) + max(0, phase - 0.1 / 3))
    assert zero2["step_seconds"] == pytest.approx(zero1["step_seconds"])
    assert zero2["peak_bytes"] <= zero1["peak_bytes"]


@pytest.mark.parametrize(
    ("memory", "recommended"),
    [("90MB", ("zero1_custom", "32-true")), ("78MB", ("zero2_custom", "32-true"))],
)
def test_sharded_accumulation_is_recommended_where_nothing_else_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str, recommended: tuple[str, str]
) -> None:
    # Buckets of one matrix each, of which four are on their way at most.
    size = ("--world-size", "64", "--memory", memory, "--reserve", "0", "--bucket-cap-mb", "4", "--accumulate", "2")
    result = plan(capsys, 0, "--config", write(tmp_path), *size)
    assert tuple(result["recommended"].values()) == recommended
    assert main(["plan", "--config", write(tmp_path), *size]) == 0
    printed = capsys.readouterr().out
    assert "between micro-batches" in printed and result["why"] in printed


def test_bytes_of_everything_sharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--world-size", "16", "--devices-per-node", "8", "--bandwidth", "8Gbit", "--compute-seconds", "0.03")
    zero1, zero3, narrow = rows(
        plan(capsys, 0, "--config", write(tmp_path), *size), "zero1_custom", "zero3_custom", "zero3_custom/16"
    )
    trained, frozen = 9 * MATRIX, MATRIX
    assert zero3["held_bytes"] == narrow["held_bytes"] == (16 * trained + 4 * frozen) / 16
    assert zero3["accumulating_bytes"] == zero3["held_bytes"]
    # While the second unit of backward runs: two units' parameters, its gradients, and those that are on their way.
    after_gradients = zero3["held_bytes"] - 4 * trained / 16
    assert after_gradients + 4 * 4 * MATRIX <= zero3["peak_bytes"] <= zero3["held_bytes"] + 4 * 4 * MATRIX
    assert narrow["peak_bytes"] < zero3["peak_bytes"]
    # Parameters twice, frozen ones, too, and gradients once.
    assert zero3["sent_bytes"] == 15 / 16 * 4 * (2 * 10 * MATRIX + trained)
    assert narrow["sent_bytes"] == 15 / 16 * (2 * 2 * 10 * MATRIX + 4 * trained)
    # A ring, which crosses each node's link with all but a rank's part.
    assert zero3["wire_seconds"] == pytest.approx(zero3["sent_bytes"] / 1e9)
    forward, backward = 15 / 16 * 4 * 10 * MATRIX / 1e9, 15 / 16 * 4 * (10 * MATRIX + trained) / 1e9
    assert zero3["step_seconds"] == pytest.approx(0.03 + forward - 0.01 + backward - 0.02)
    assert zero3["sent_bytes"] > 1.5 * zero1["sent_bytes"]


def test_every_micro_batch_gathers_and_reduces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--world-size", "4", "--bandwidth", "8Gbit", "--compute-seconds", "0.03", "--config", write(tmp_path))
    (once,) = rows(plan(capsys, 0, *size), "zero3_custom")
    (thrice,) = rows(plan(capsys, 0, *size, "--accumulate", "3"), "zero3_custom")
    assert thrice["sent_bytes"] == 3 * once["sent_bytes"]
    assert thrice["accumulating_bytes"] == once["held_bytes"]
    # Gradients of earlier micro-batches are there in backward, where there were none.
    assert once["peak_bytes"] < thrice["peak_bytes"] <= once["peak_bytes"] + 4 * 9 * MATRIX / 4
    # All that is computed hides behind what is sent.
    assert once["step_seconds"] == pytest.approx(once["wire_seconds"])
    assert thrice["step_seconds"] == pytest.approx(3 * once["wire_seconds"])


@pytest.mark.parametrize(
    ("init_args", "units"),
    [({}, 0), ({"wrap": ["Linear"]}, 10), ({"min_num_params": 10}, 10), ({"wrap": ["Other"]}, None)],
)
def test_units_are_those_of_the_configurations_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], init_args: dict[str, Any], units: int | None
) -> None:
    path = Path(write(tmp_path, width=64))
    config = yaml.safe_load(path.read_text())
    config["trainer"]["strategy"] = {"class_path": "lightning_parstrat.ZeRO3Strategy", "init_args": init_args}
    path.write_text(yaml.safe_dump(config))
    if units is None:
        assert main(["plan", "--config", str(path), "--world-size", "4"]) == 2
        assert "Other" in capsys.readouterr().err
        return
    (zero3,) = rows(plan(capsys, 0, "--config", str(path), "--world-size", "4"), "zero3_custom")
    matrix = 64 * 64
    # What is gathered for itself is gathered twice.
    assert zero3["sent_bytes"] == 3 / 4 * 4 * matrix * ((20 if units else 10) + 9)
    assert (zero3["peak_bytes"] < zero3["held_bytes"] + 5 * 4 * matrix) == bool(units)


class Odd(LightningModule):
    """A scalar, which cannot be sharded, a buffer, and layers too small for units."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.scale = nn.Parameter(torch.zeros(()))
        self.vector = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(100))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("automatic", "whole"), [(True, 1), (False, 5)])
def test_what_cannot_be_sharded_is_counted_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], automatic: bool, whole: int
) -> None:
    path = tmp_path / "c.yaml"
    model = {"class_path": f"{__name__}.Odd", "init_args": {"automatic": automatic}}
    path.write_text(yaml.safe_dump({"model": model}))
    (zero3,) = rows(plan(capsys, 0, "--config", str(path), "--world-size", "4"), "zero3_custom")
    # In manual optimization nothing gathers what the module itself has.
    assert zero3["held_bytes"] == 8 * (3 * 64 + 5 - whole) / 4 + 8 * whole + 4 * 100


def test_ddp_holds_what_was_measured() -> None:
    measured = json.loads((Path(__file__).parents[2] / "benchmarks/results/memory.json").read_text())
    parameters = [
        ParameterSpec(name="all", shape=(measured["parameters"],), dtype="torch.float32", itemsize=4, group="a")
    ]
    estimate = estimate_ddp(parameters, 8, Cluster(nodes=1, devices=2), "32-true", gradients_in_buckets=False)
    assert estimate.held_bytes == pytest.approx(measured["memory"]["ddp"]["held_growth"], rel=0.03)


@pytest.mark.parametrize(
    ("link", "recommended"),
    [
        # By Ethernet, half of what is sent hides behind the next forward; between GPUs everything hides anyway.
        (("--bandwidth", "8Gbit"), "zero1_custom"),
        (("--bandwidth", "8000Gbit"), "ddp_tuned"),
    ],
)
def test_of_two_that_fit_the_faster_one_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], link: tuple[str, str], recommended: str
) -> None:
    size = ("--world-size", "8", "--devices-per-node", "4", "--memory", "10GB", "--compute-seconds", "0.05")
    result = plan(capsys, 0, "--config", write(tmp_path), *size, *link)
    assert result["recommended"]["strategy"] == recommended
    seconds = rows(result, recommended)[0]["step_seconds"]
    assert f"A step is predicted to take {seconds:.3g} s." in result["why"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "which depend on the batch"), (("--memory", "10GB", "--reserve", "0.3"), "3 GB of 10 GB are kept for them")],
)
def test_what_is_left_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    size = ("--config", write(tmp_path), "--world-size", "8", *arguments)
    left_out = plan(capsys, 0, *size)["left_out"]
    assert "activations" in left_out and said in left_out
    assert main(["plan", *size]) == 0
    assert left_out in capsys.readouterr().out


def test_zero3_says_that_it_tries_the_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--world-size", "8", "--memory", "45MB", "--reserve", "0")
    for optimizer, says in (("AdamW", False), ("Muon", True)):
        result = plan(capsys, 0, "--config", write(tmp_path, optimizer=optimizer), *size)
        assert result["recommended"]["strategy"] == "zero3_custom"
        assert ("refused where it looks at whole matrices" in result["why"]) == says


class PlannedElsewhere(pytorch_lightning.LightningModule):
    """A module of the other package that Lightning is published as."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)


def test_a_module_of_pytorch_lightning_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": f"{__name__}.PlannedElsewhere"}))
    ddp = ddp_of(plan(capsys, 0, "--config", str(path), "--world-size", "2"))
    assert ddp["held_bytes"] == 16 * 8 * 8


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("SGD", 8), ("Adagrad", 12), ("AdamW", 16), ("Adam", 16)])
def test_the_optimizers_own_state_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str, per_parameter: int
) -> None:
    result = plan(capsys, 0, "--config", write(tmp_path, optimizer=optimizer), "--world-size", "2")
    assert ddp_of(result)["held_bytes"] == per_parameter * 9 * MATRIX + 4 * MATRIX


def test_an_optimizer_of_the_configuration_goes_over_the_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(write(tmp_path))
    config = yaml.safe_load(path.read_text())
    config["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    path.write_text(yaml.safe_dump(config))
    result = plan(capsys, 0, "--config", str(path), "--world-size", "2")
    assert ddp_of(result)["held_bytes"] == 8 * 9 * MATRIX + 4 * MATRIX


class Talking(LightningModule):
    """Prints, asks a small tensor of its own, and takes any argument."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        print("made")
        rate = torch.linspace(0, 0.5, 3)[1].item()
        self.layer = nn.Linear(sizes["width"], 4, bias=rate == 0.25)

    def configure_optimizers(self) -> Any:
        print("configured")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_modules_that_print_and_look_at_small_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": f"{__name__}.Talking", "dict_kwargs": {"width": 8}}}))
    result = plan(capsys, 0, "--config", str(path), "--world-size", "2")
    assert ddp_of(result)["held_bytes"] == 8 * (8 * 4 + 4)


@pytest.mark.parametrize(
    ("bandwidth", "rate"), [("8Gbit", 1e9), ("8Gbit/s", 1e9), ("8G", 1e9), ("1GB/s", 1e9), ("100Mbit", 12.5e6)]
)
def test_bandwidths(tmp_path: Path, capsys: pytest.CaptureFixture[str], bandwidth: str, rate: float) -> None:
    size = ("--world-size", "2", "--devices-per-node", "1", "--bandwidth", bandwidth)
    (zero1,) = rows(plan(capsys, 0, "--config", write(tmp_path), *size), "zero1_custom")
    assert zero1["wire_seconds"] == pytest.approx(4 * 9 * MATRIX / rate)


@pytest.mark.parametrize(
    ("memory", "code", "recommended", "why"),
    [
        ("10GB", 0, ("ddp_tuned", "32-true"), "Both fit, and it shards nothing"),
        ("140MB", 0, ("zero1_custom", "32-true"), "DDP does not fit"),
        ("80MB", 0, ("zero1_custom", "bf16-true"), "In fp32 it fits under neither"),
        ("80MB", 0, ("zero1_custom", "bf16-true"), "In fp32 it would fit under zero3_custom alone"),
        ("45MB", 0, ("zero3_custom", "32-true"), "FSDP2"),
        ("34MB", 0, ("zero3_custom", "bf16-mixed"), 'gather_dtype="bf16"'),
        ("20MB", 1, None, "Take more ranks"),
    ],
)
def test_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str, code: int, recommended: Any, why: str
) -> None:
    size = ("--world-size", "8", "--memory", memory, "--reserve", "0")
    result = plan(capsys, code, "--config", write(tmp_path), *size)
    found = result["recommended"]
    assert (None if found is None else (found["strategy"], found["precision"])) == recommended
    assert why in result["why"]


@pytest.mark.parametrize(("memory", "said"), [((), "No --memory was given"), (("--memory", "10GB"), "Both fit")])
@pytest.mark.parametrize("link", [(), ("--bandwidth", "8Gbit"), ("--bandwidth", "8000Gbit")])
def test_what_fits_is_known_only_if_memory_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: tuple[str, ...], said: str, link: tuple[str, ...]
) -> None:
    size = ("--world-size", "8", "--devices-per-node", "4", *link, *(("--compute-seconds", "0.05") if link else ()))
    why = plan(capsys, 0, "--config", write(tmp_path), *size, *memory)["why"]
    assert said in why and ("fit" not in why.replace("what fits", "")) == (not memory)


@pytest.mark.parametrize(("text", "nbytes"), [("80GB", 80e9), ("80G", 80e9), ("24GiB", 24 * 2**30), ("800000B", 8e5)])
def test_memory_is_written_with_a_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, nbytes: float
) -> None:
    size = ("--world-size", "2", "--memory", text)
    assert main(["plan", "--config", write(tmp_path), *size]) in (0, 1)
    assert f" of {amount(nbytes)} are kept for them" in capsys.readouterr().out


def test_without_a_trainer_the_optimizer_is_taken_for_adamw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", write(tmp_path, needs_trainer=True), "--world-size", "2"]) == 0
    assert "taken for AdamW" in capsys.readouterr().out


def test_a_class_that_the_file_does_not_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"width": 64}}))
    size = ("--config", str(path), "--world-size", "2")
    assert main(["plan", *size]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["plan", *size, "--model", f"{__name__}.Planned"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--world-size", "3", "--devices-per-node", "2"), "not a multiple"),
        (("--world-size", "2", "--memory", "much"), "--memory 'much'"),
        (("--world-size", "2", "--memory", "80"), "--memory '80': write a number and a unit, such as 80GB"),
        (("--world-size", "2", "--bandwidth", "fast"), "--bandwidth"),
        (("--world-size", "2", "--bandwidth", "100"), "--bandwidth '100': write a number and a unit"),
        (("--world-size", "2", "--reserve", "20"), "--reserve 20: write a part of the memory, such as 0.2"),
        (("--world-size", "2", "--reserve", "1"), "0 <= reserve < 1"),
        (("--world-size", "2", "--reserve", "-0.1"), "0 <= reserve < 1"),
        (("--world-size", "2", "--bandwidth", "0Gbit"), "more than 0"),
        (("--world-size", "2", "--model", "nowhere.Nothing"), "nowhere.Nothing"),
        (("--world-size", "2", "--model", "torch.nn.Linear"), "not a LightningModule"),
        (("--world-size", "2", "--calibration", "missing.json"), "missing.json"),
    ],
)
def test_wrong_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"width": 64}}))
    assert main(["plan", "--config", str(path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--world-size", "4", "--devices-per-node", "2", "--memory", "140MB", "--reserve", "0")
    link = ("--bandwidth", "8Gbit", "--compute-seconds", "0.03")
    assert main(["plan", "--config", write(tmp_path), *size, *link]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "9.4 M trainable parameters and 1.0 M elements that are not trained; optimizer: AdamW"
    assert lines[1] == "4 ranks on 2 nodes; per rank, without activations:"
    header = next(line for line in lines if line.startswith("strategy"))
    assert header.split("  ")[-1].strip() == "fits in 140 MB" and "on the wire" in header and " step " in header
    rows = {line.split()[0]: line for line in lines if line.startswith(("ddp_tuned", "zero1_custom"))}
    assert rows["ddp_tuned"].endswith("no") and " s " in rows["ddp_tuned"]


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ({"class_path": f"{__name__}.Planned", "init_args": {"depth": 3}}, {}, "arguments cannot be read"),
        ({"class_path": f"{__name__}.Planned", "init_args": {"width": -1}}, {}, "cannot be created"),
        ({"class_path": "lightning.pytorch.LightningModule"}, {}, "no trainable parameters"),
        (
            {"class_path": f"{__name__}.Planned", "init_args": {"width": 8}},
            {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": -1.0}}},
            "optimizer cannot be created",
        ),
    ],
)
def test_modules_and_optimizers_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"fit": {"model": model, **more}}))
    assert main(["plan", "--config", str(path), "--world-size", "2"]) == 2
    assert said in capsys.readouterr().err


def test_a_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", write(tmp_path), "--world-size", "2", "--", "python", "train.py"]) == 2
    assert "runs no program" in capsys.readouterr().err


class TwoOptimizers(LightningModule):
    """Configures a pair in a tuple, one of them of a class whose state is not known."""

    def __init__(self, unknown: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.unknown = unknown

    def configure_optimizers(self) -> Any:
        kind = Unheard if self.unknown else torch.optim.SGD
        return [torch.optim.Adam(self.one.parameters(), lr=0.1), kind(self.two.parameters(), lr=0.1)]


class Unheard(torch.optim.SGD):
    """Might keep anything."""


@pytest.mark.parametrize(("unknown", "per_parameter"), [(False, 12.0), (True, 16.0)])
def test_several_optimizers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unknown: bool, per_parameter: float
) -> None:
    path = tmp_path / "c.yaml"
    model = {"class_path": f"{__name__}.TwoOptimizers", "init_args": {"unknown": unknown}}
    path.write_text(yaml.safe_dump({"model": model}))
    result = plan(capsys, 0, "--config", str(path), "--world-size", "2")
    assert ddp_of(result)["held_bytes"] == per_parameter * 2 * 64


@pytest.mark.parametrize("world_size", [1, 2, 7, 16])
def test_estimates_at_any_world_size(world_size: int) -> None:
    parameters = [
        ParameterSpec(name=str(n), shape=(n + 1, 33), dtype="torch.float32", itemsize=4, group="a") for n in range(50)
    ]
    cluster = Cluster(nodes=1, devices=world_size)
    ddp = estimate_ddp(parameters, 8, cluster, "32-true")
    zero1 = estimate_zero1(parameters, 8, cluster, "32-true", bucket_cap_bytes=2**14)
    units = [GatheredUnit([one.shape]) for one in parameters]
    zero3 = estimate_zero3(FullySharded(GatheredUnit([]), units, world_size), 8, cluster, "32-true")
    assert zero3.peak_bytes > zero3.held_bytes
    if world_size == 1:
        assert ddp.sent_bytes == zero1.sent_bytes == zero3.sent_bytes == 0 and ddp.wire_seconds == 0
        assert zero3.held_bytes == ddp.held_bytes
    else:
        assert zero3.held_bytes < zero1.held_bytes < ddp.held_bytes and zero1.wire_seconds is None
        assert zero3.step_seconds(1.0) is None


@pytest.mark.parametrize(("shard_group", "size", "between"), [("node", 8, 0.0), ("16", 16, 1.0), ("4", 4, 0.0)])
def test_shard_groups_hold_a_copy_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shard_group: str, size: int, between: float
) -> None:
    cluster = ("--world-size", "32", "--devices-per-node", "8", "--bandwidth", "8Gbit")
    result = plan(capsys, 0, "--config", write(tmp_path), *cluster, "--shard-group", shard_group)
    zero1, narrow = rows(result, "zero1_custom", "zero1_custom/16")
    count, copies = 9 * MATRIX, 32 // size
    assert zero1["held_bytes"] == (4 + 12 / size) * count + 4 * MATRIX
    assert narrow["held_bytes"] == (2 + 16 / size) * count + 2 * MATRIX
    summed = 2 * (copies - 1) / copies * 4 * count / size
    assert zero1["sent_bytes"] == pytest.approx(2 * (size - 1) / size * 4 * count + summed, abs=1)
    # Groups of two nodes send half of each phase's bytes over a node's link, and all groups the shards of a node.
    assert zero1["wire_seconds"] == pytest.approx((between * 4 * count + 8 * summed) / 1e9)


@pytest.mark.parametrize(
    ("ranks", "asked", "advised"),
    [("64", [], None), ("128", [], 64), ("1024", [], 64), ("1056", [], 48), ("1024", ["--shard-group", "32"], None)],
)
def test_shard_groups_are_advised_where_they_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str, asked: list[str], advised: int | None
) -> None:
    size = ("--world-size", ranks, "--devices-per-node", "8")
    why = plan(capsys, 0, "--config", write(tmp_path), *size, *asked)["why"]
    assert ("shard_group=" in why) == (advised is not None)
    assert advised is None or f"shard_group={advised} " in why


@pytest.mark.parametrize("shard_group", ["3", "0", "nodes", "64"])
def test_shard_groups_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shard_group: str
) -> None:
    asked = ("--world-size", "32", "--devices-per-node", "8", "--shard-group", shard_group)
    try:
        assert main(["plan", "--config", write(tmp_path), *asked]) == 2
    except SystemExit as error:
        assert error.code == 2
    assert "shard" in capsys.readouterr().err
