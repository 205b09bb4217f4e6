"""Estimates by numbers or for a configuration's module: its bytes, what fits, and what is recommended."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parstrat.cli.main import main
from tests.strategies.tensor_parallel import Transformer

WIDTH = 1024
MATRIX = WIDTH * WIDTH


class Planned(LightningModule):
    """Ten matrices, one of them frozen, and a buffer."""

    def __init__(self, width: int, optimizer: str = "AdamW", needs_trainer: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(10))
        self.layers[0].requires_grad_(False)
        self.register_buffer("mean", torch.zeros(MATRIX))
        self.optimizer = optimizer
        self.needs_trainer = needs_trainer

    def configure_optimizers(self) -> Any:
        print("configured")
        if self.needs_trainer:
            print(self.trainer.estimated_stepping_batches)
        optimizer = getattr(torch.optim, self.optimizer)([p for p in self.parameters() if p.requires_grad], lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def plan(capsys: pytest.CaptureFixture[str], code: int, words: str, *more: str) -> dict[str, Any]:
    assert main(["plan", "--json", *words.split(), *more]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {**result, **{row["strategy"]: row for row in result["estimates"]}}


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a configuration, and gives the arguments that name it."""

    def write(model: Any = None, **sections: Any) -> tuple[str, str]:
        given = model or {"class_path": f"{__name__}.Planned", "init_args": {"width": WIDTH}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": given, **sections}))
        return "--config", str(tmp_path / "c.yaml")

    return write


# Bytes per parameter of 16 ranks: precision, micro-batches, and of each strategy at most, between steps, between
# micro-batches, and sent in 16ths; with Adam, and units of 1/32.
IN_16THS = {
    ("32-true", 1): {
        "ddp": (20, 20, 20, 120),
        "ddp_tuned": (16, 16, 16, 120),
        "zero1_custom": (8 + 12 / 16, 4 + 12 / 16, 8 + 8 / 16, 120),
        "zero3_custom": (1 + 16 / 32, 1, 1, 180),
    },
    ("32-true", 4): {
        "zero1_custom": (8 + 12 / 16, 4 + 12 / 16, 8 + 8 / 16, 120),
        "zero2_custom": (None, 4 + 12 / 16, 4 + 12 / 16, 300),
        "zero3_custom": (1 + 16 / 32, 1, 1, 720),
    },
    ("bf16-mixed", 1): {"ddp_tuned": (18, 16, 16, 120), "zero3_custom": (1 + 12 / 32, 1, 1, 120)},
    ("bf16-true", 1): {
        "ddp_tuned": (8, 8, 8, 60),
        "zero1_custom": (4 + 16 / 16, 2 + 16 / 16, 4 + 12 / 16, 60),
        "zero3_custom": (0.5 + 12 / 32, 0.5, 0.5, 90),
    },
}


def test_bytes_per_parameter_are_those_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    for (precision, micro_batches), expected in IN_16THS.items():
        words = f"--parameters 3.2B --optimizer adamw --precision {precision} --world-size 16"
        result = plan(capsys, 0, f"{words} --accumulate {micro_batches}")
        for strategy, (peak, held, accumulating, sent) in expected.items():
            row = result[strategy]
            assert row["held_bytes"] == pytest.approx(3.2e9 * held), (precision, strategy)
            assert row["sent_bytes"] == pytest.approx(3.2e9 * sent / 16), (precision, strategy)
            assert peak is None or row["peak_bytes"] == pytest.approx(3.2e9 * peak), (precision, strategy)
            between = None if micro_batches == 1 else pytest.approx(3.2e9 * accumulating)
            assert row["accumulating_bytes"] == between, (precision, strategy)
        assert "zero2_custom" not in result or 0 < result["zero2_custom"]["peak_bytes"] / 3.2e9 < 8
    values = {"adamw": 2, "SGD": 0, "torch.optim.Adagrad": 1, "0.5": 0.5}
    for optimizer, count in values.items():
        result = plan(capsys, 0, f"--parameters 10M --optimizer {optimizer} --world-size 2")
        assert result["ddp_tuned"]["held_bytes"] == (8 + 4 * count) * 10**7, optimizer


def test_times_of_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--parameters 10M --world-size 16 --devices-per-node 8 --compute-seconds 0.03 --bandwidth"
    result = plan(capsys, 0, f"{words} 8Gbit")
    tuned, zero1, zero3 = (result[name] for name in ("ddp_tuned", "zero1_custom", "zero3_custom"))
    size = 4 * 10**7
    assert tuned["sending_seconds"] == pytest.approx(2 * 15 / 16 * size / 1e9)
    assert tuned["step_seconds"] == pytest.approx(0.03 + tuned["sending_seconds"] - 0.02)
    # Between two nodes half of each phase's bytes pass a node's link; one phase hides behind the next forward.
    half = size / 2 / 1e9
    assert zero1["sending_seconds"] == pytest.approx(2 * half)
    assert zero1["step_seconds"] == pytest.approx(0.03 + max(0, half - 0.02) + max(0, half - 0.01))
    phase = 15 / 16 * size / 1e9
    assert zero3["step_seconds"] == pytest.approx(0.03 + phase - 0.01 + 2 * phase - 0.02)
    # By Ethernet, half of what is sent hides behind the next forward; between GPUs everything hides anyway.
    assert result["recommended"] == "zero1_custom"
    assert plan(capsys, 0, f"{words} 8000Gbit --memory 1TB")["recommended"] == "ddp_tuned"
    rates = {"8Gbit/s": 1e9, "8G": 1e9, "8Gb/s": 1e9, "1GB/s": 1e9, "100Mbit": 12.5e6, "8gbps": 1e9}
    for text, rate in rates.items():
        result = plan(capsys, 0, f"--parameters 10M --world-size 2 --devices-per-node 1 --bandwidth {text}")
        assert result["zero1_custom"]["sending_seconds"] == pytest.approx(size / rate), text


def test_shard_groups_hold_a_copy_each(capsys: pytest.CaptureFixture[str]) -> None:
    for group, size, between in (("node", 8, 0.0), ("16", 16, 1.0), ("4", 4, 0.0)):
        words = f"--parameters 10M --world-size 32 --devices-per-node 8 --bandwidth 8Gbit --shard-group {group}"
        zero1, copies = plan(capsys, 0, words)["zero1_custom"], 32 // size
        assert zero1["held_bytes"] == (4 + 12 / size) * 10**7
        summed = 2 * (copies - 1) / copies * 4 * 10**7 / size
        assert zero1["sent_bytes"] == pytest.approx(2 * (size - 1) / size * 4 * 10**7 + summed, abs=1)
        # Groups of two nodes send half of each phase's bytes over a node's link, and all groups the shards of a node.
        assert zero1["sending_seconds"] == pytest.approx((between * 4 * 10**7 + 8 * summed) / 1e9)
        zero3 = plan(capsys, 0, words)["zero3_custom"]
        assert zero3["held_bytes"] == 16 / size * 10**7
        assert zero3["sent_bytes"] == pytest.approx(3 * (size - 1) / size * 4 * 10**7 + summed, abs=1)


def test_groups_that_train_alone_send_in_turns_and_are_never_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    for group, size in (("node", 8), ("16", 16)):
        words = f"--parameters 10M --world-size 32 --devices-per-node 8 --bandwidth 8Mbit --shard-group {group}"
        result = plan(capsys, 0, f"{words} --compute-seconds 1 --outer-every 50")
        own, copies = result["zero1_custom outer_every=50"], 32 // size
        met = 2 * (copies - 1) / copies * 4 * 10**7 / size / 50
        assert own["held_bytes"] == (4 + 16 / size) * 10**7
        assert own["sent_bytes"] == pytest.approx(2 * (size - 1) / size * 4 * 10**7 + met, abs=1)
        within = 4 * 10**7 if size > 8 else 0
        assert own["sending_seconds"] == pytest.approx((within + 8 * met) / 1e6)
        assert own["step_seconds"] < result["zero1_custom"]["step_seconds"]
        assert "outer_every" not in result["recommended"]
    assert main(["plan", "--parameters", "10M", "--world-size", "4", "--outer-every", "50"]) == 2
    assert "give --shard-group node" in capsys.readouterr().err


def test_ranks_that_share_layers(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    words = "--parameters 10M --world-size 16 --devices-per-node 8 --tensor-parallel 2"
    result = plan(capsys, 0, words)
    zero3 = result["zero3_custom"]
    assert [row["strategy"] for row in result["estimates"]] == [result["recommended"]] == ["zero3_custom"]
    assert zero3["held_bytes"] == 10**7
    assert zero3["sent_bytes"] == 3 * 7 / 8 * 2 * 10**7 and "also send activations" in result["left_out"]
    grouped = plan(capsys, 0, f"{words} --shard-group node")["zero3_custom"]
    assert grouped["held_bytes"] == 2 * 10**7
    assert main(["plan", *words.split(), "--shard-group", "node"]) == 0
    assert "16 ranks on 2 nodes, of which 2 share layers, in shard groups of 4; per rank" in capsys.readouterr().out
    # The layers that a module's plan names, and no others.
    strategy = {"class_path": "ZeRO3Strategy", "init_args": {"tensor_parallel_size": 2}}
    model = {"class_path": "tests.strategies.tensor_parallel.Transformer"}
    found = plan(capsys, 0, "--world-size 4", *config(model, trainer={"strategy": strategy}))["zero3_custom"]
    every = sum(one.numel() for one in Transformer().parameters())
    linears = [part for block in Transformer().blocks for part in block.modules() if isinstance(part, nn.Linear)]
    cut = sum(one.numel() for part in linears for one in part.parameters())
    assert found["held_bytes"] == pytest.approx(16 * (every - cut / 2) / 2, abs=1)


def test_what_equal_shares_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--parameters 10M --world-size 2 --rank-shares 3 1"
    assert plan(capsys, 0, words)["equal_shares_take_times"] == 2.0
    assert main(["plan", *words.split()]) == 0
    said = capsys.readouterr().out
    assert "take 2.00 times as long" in said and "activations of up to 1.5 equal ones" in said
    assert "Equal shares" not in (main(["plan", *words.split()[:4]]), capsys.readouterr().out)[1]


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    # 10M parameters on 8 ranks hold 160, 95 and 20 MB, and zero3_custom at most 25.
    rows = {
        "1GB": ("ddp_tuned", "It shards least of those that fit"),
        "150MB": ("zero1_custom", "It shards least of those that fit"),
        "60MB": ("zero3_custom", "Only with parameters sharded, too, it fits; it sends 1.5 times as much"),
        "24MB": (None, "take more ranks, or --precision bf16-true"),
    }
    for memory, (choice, why) in rows.items():
        words = f"--parameters 10M --world-size 8 --reserve 0 --memory {memory}"
        result = plan(capsys, 1 if choice is None else 0, words)
        assert result["recommended"] == choice and why in result["why"], result["why"]
        fits = [row["strategy"] for row in result["estimates"] if row["fits"]]
        assert choice is None or next(name for name in fits if name != "ddp") == choice
    # Of 100M parameters buckets are small enough to tell the second stage from the first.
    words = "--parameters 1B --world-size 64 --reserve 0 --accumulate 2 --memory"
    assert plan(capsys, 0, f"{words} 7GB")["recommended"] == "zero2_custom"
    assert plan(capsys, 0, f"{words} 9GB")["recommended"] == "zero1_custom"
    unknown = plan(capsys, 0, "--parameters 10M --world-size 8")
    assert unknown["recommended"] == "zero1_custom" and "No --memory was given" in unknown["why"]
    assert plan(capsys, 0, "--parameters 10M --world-size 1")["recommended"] == "none"


def test_the_table_gives_the_peak_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--parameters 7B --optimizer adamw --precision bf16-mixed --world-size 16 --devices-per-node 8 --memory 80GB"
    )
    link = "--bandwidth 100Gbit --compute-seconds 1 --accumulate 2 --reserve 0.3"
    assert main(["plan", *words.split(), *link.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "7B trained parameters; optimizer: AdamW; bf16-mixed"
    assert lines[1] == "16 ranks on 2 nodes; per rank:"
    columns = "strategy at most between steps between micro-batches sent per step sending step"
    columns += " computing / sending times one device fits in 56 GB"
    assert " ".join(lines[3].split()) == columns
    ddp, *_, last = (line.split() for line in lines[5:9])
    # 16 devices, each of which computes for 1 s.
    assert float(ddp[-2]) == pytest.approx(16 / float(ddp[-5]), rel=0.01), (ddp, last)
    assert lines[5].endswith("no") and lines[8].endswith("yes")
    assert "activations" in lines[-1] and "24 GB of 80 GB are kept for them (--reserve 0.3)" in lines[-1]


def test_a_loader_takes_its_share_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--parameters 1B --world-size 16 --bandwidth 100Gbit --compute-seconds 2"
    with_loader, without = (plan(capsys, 0, f"{words} {more}")["zero1_custom"] for more in ("--loader-seconds 0.5", ""))
    assert with_loader["step_seconds"] == pytest.approx(without["step_seconds"] + 0.5)
    assert with_loader["loading"] == pytest.approx(0.5 / with_loader["step_seconds"]) and without["loading"] is None
    # One device waits for its loader, too.
    assert with_loader["speed_up"] == pytest.approx(16 * 2.5 / with_loader["step_seconds"])
    assert with_loader["computing_per_sending"] == pytest.approx(2 / with_loader["sending_seconds"])


def test_ranks_that_share_layers_compute_a_part_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--parameters 10K --world-size 16 --bandwidth 100Gbit --compute-seconds 2"
    alone, shared = (plan(capsys, 0, f"{words} --tensor-parallel {size}")["zero3_custom"] for size in (1, 2))
    assert shared["step_seconds"] == pytest.approx(alone["step_seconds"] / 2, rel=0.01)
    # Two ranks train a batch in half the time.
    assert shared["speed_up"] == pytest.approx(alone["speed_up"], rel=0.01) == 16


def test_a_configurations_module(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    result = plan(capsys, 0, "--world-size 16", *config(trainer={"strategy": "ddp"}))
    trained, others = 9 * MATRIX, 2 * MATRIX
    assert result["ddp_tuned"]["held_bytes"] == 16 * trained + 4 * others
    assert result["zero1_custom"]["held_bytes"] == (4 + 12 / 16) * trained + 4 * others
    assert result["zero1_custom"]["peak_bytes"] == result["zero1_custom"]["held_bytes"] + 4 * trained
    zero3 = result["zero3_custom"]
    assert zero3["held_bytes"] == (16 * trained + 4 * MATRIX) / 16 + 4 * MATRIX
    # Each matrix is a unit: the parameters of two, and the gradients of two.
    assert zero3["peak_bytes"] - zero3["held_bytes"] == pytest.approx(16 * MATRIX, rel=0.3)
    narrow = plan(capsys, 0, "--world-size 16", *config(fit={"trainer": {"precision": "bf16-true"}}))
    assert narrow["zero1_custom"]["held_bytes"] == (2 + 16 / 16) * trained + 2 * others
    assert plan(capsys, 0, "--world-size 16 --precision 32-true", *config())["estimates"] == result["estimates"]
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    short = {"class_path": "SGD", "init_args": {"lr": 0.1}}
    by_words = ("--world-size 2 --optimizer sgd", {})
    for words, given in (
        by_words,
        *(("--world-size 2", {"optimizer": one}) for one in (sgd, short, "torch.optim.SGD")),
    ):
        assert plan(capsys, 0, words, *config(**given))["ddp_tuned"]["held_bytes"] == 8 * trained + 4 * others
    # What is not known is taken for AdamW's.
    for changed in ({"needs_trainer": True}, {"optimizer": "Muon"}):
        model = {"class_path": f"{__name__}.Planned", "init_args": {"width": WIDTH, **changed}}
        arguments = config(model)
        assert plan(capsys, 0, "--world-size 2", *arguments)["ddp_tuned"]["held_bytes"] == 16 * trained + 4 * others
        assert main(["plan", "--world-size", "2", *arguments]) == 0
        assert "AdamW" in capsys.readouterr().out.splitlines()[0]
    assert plan(capsys, 0, f"--world-size 2 --model {__name__}.Planned", *config({"width": WIDTH}))


def test_units_are_those_of_the_configurations_strategy(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    model = {"class_path": f"{__name__}.Planned", "init_args": {"width": 64}}
    for init_args, units in (({}, 0), ({"auto_wrap_policy": ["Linear"]}, 10), ({"min_num_params": 10}, 10)):
        strategy = {"class_path": "lightning_parstrat.ZeRO3Strategy", "init_args": init_args}
        result = plan(capsys, 0, "--world-size 4", *config(model, trainer={"strategy": strategy}))
        matrix, every = 64 * 64, 10 * 64 * 64
        # What is gathered for itself is gathered twice.
        again = 10 * matrix if units else 0
        assert result["zero3_custom"]["sent_bytes"] == pytest.approx(3 * (every + again + 9 * matrix), rel=1e-3)


def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_number, of_ten = ("--parameters", "10M"), {"width": 64}
    planned = f"{__name__}.Planned"
    wrong: list[tuple[tuple[str, ...], str, str]] = [
        (by_number, "--memory 80", "--memory '80': write a number and a unit, such as 80GB"),
        (by_number, "--bandwidth 100", "--bandwidth '100': write a number and a unit"),
        (by_number, "--bandwidth 0Gbit", "more than 0"),
        (by_number, "--reserve 20", "--reserve 20: write a part of the memory, such as 0.2"),
        (by_number, "--devices-per-node 4", "not a multiple"),
        (by_number, "--shard-group 3", "--shard-group"),
        (by_number, "--compute-seconds -1", "--compute-seconds -1: write seconds > 0."),
        (by_number, "--compute-seconds inf", "write seconds > 0."),
        (by_number, "--loader-seconds nan", "write seconds >= 0"),
        (by_number, "--memory 80Gbit", "--memory '80Gbit': write bytes, such as 80GB"),
        (by_number, "--activations 2MB/s", "write bytes, such as 2MB"),
        (by_number, "--optimizer -1", "--optimizer -1: write a class, or how many values"),
        (by_number, "--rank-shares inf 1", "a positive number for each"),
        (by_number, f"--world-size {10**20}", "write at most 1048576"),
        (("--parameters", "0.0001K"), "", "write a number such as 7B"),
        (by_number, "--loader-seconds 1", "--loader-seconds 1: write seconds >= 0, and give --bandwidth"),
        (by_number, "--tensor-parallel 3", "--tensor-parallel 3 does not divide --world-size 2"),
        (config(of_ten), f"--model {planned} --tensor-parallel 2", "has none. Set it in the module: `self.tp_plan"),
        (by_number, "--rank-shares 3", "--rank-shares: write a positive number for each of the 2 ranks"),
        (by_number, "--rank-shares 3 0", "a positive number for each"),
        (by_number, "--optimizer muon", "its state is not known. Write how many values"),
        (by_number, "--optimizer nothing", "No class 'nothing'"),
        (by_number, "--unit 11M", "--unit 11M is more than --parameters 10M"),
        ((), "", "Give either the number of parameters, such as --parameters 7B"),
        (("--parameters", "7000000000"), "", "write a number and a unit, such as 7B"),
        ((*by_number, *config()), "", "Give either the number of parameters"),
        (config(of_ten), "", "--model"),
        (config(of_ten), "--model nowhere.Nothing", "nowhere.Nothing"),
        (config(of_ten), "--model torch.nn.Linear", "not a LightningModule"),
        (config(of_ten), "--model main", "No class 'main' is known"),
        (config(of_ten), "--model failing.Model", "(SyntaxError: "),
        (config(of_ten), "--model unguarded.Model", "The import of unguarded ends the program. Put its LightningCLI"),
        (("--config", "missing.yaml"), "", "missing.yaml"),
        (("--config", str(tmp_path / "latin.yaml")), "", "latin.yaml"),
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text("class")
    (tmp_path / "unguarded.py").write_text("raise SystemExit(2)")
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    for arguments, words, said in wrong:
        if arguments == config(of_ten):
            config(of_ten)
        assert main(["plan", "--world-size", "2", *arguments, *words.split()]) == 2
        assert said in (printed := capsys.readouterr().err), (words, printed)
    modules: list[tuple[Any, dict[str, Any], str]] = [
        ({"class_path": planned, "init_args": {"depth": 3}}, {}, "cannot be created"),
        ({"class_path": planned, "init_args": {"width": -1}}, {}, "cannot be created"),
        ({"class_path": "lightning.pytorch.LightningModule"}, {}, "no trainable parameters"),
        (None, {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": -1.0}}}, "optimizer cannot be"),
        (None, {"trainer": {"precision": "transformer-engine"}}, "precision 'transformer-engine' is not known here"),
        (
            None,
            {"trainer": {"strategy": {"class_path": "ZeRO3Strategy", "init_args": {"auto_wrap_policy": ["Other"]}}}},
            "Other",
        ),
    ]
    for model, sections, said in modules:
        assert main(["plan", "--world-size", "2", *config(model, **sections)]) == 2
        assert said in (printed := capsys.readouterr().err), printed


PIPELINE = "--parameters 1B --world-size 4 --devices-per-node 1 --compute-seconds 1 --activations 8MB --microbatches 8"


def test_a_pipeline_wins_on_a_slow_network_and_loses_on_a_fast_one(capsys: pytest.CaptureFixture[str]) -> None:
    slow = plan(capsys, 0, f"{PIPELINE} --bandwidth 1Gbit")
    assert slow["recommended"] == "pipeline_custom"
    # A quarter of 16 bytes a parameter; 8 + 3 rounds of a quarter of the time and of a piece, in both directions.
    own = slow["pipeline_custom"]
    assert own["held_bytes"] == 4 * 10**9 and own["sent_bytes"] == 16 * 10**6
    assert own["step_seconds"] == pytest.approx(11 / 8 * (1 / 4 + 0.128))
    fast = plan(capsys, 0, f"{PIPELINE} --bandwidth 800Gbit")
    assert fast["recommended"] != "pipeline_custom"
    assert fast["zero1_custom"]["speed_up"] > fast["pipeline_custom"]["speed_up"]


def test_grids_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--parameters 1B --world-size 64 --devices-per-node 8 --compute-seconds 1 --activations 8MB"
    words += " --microbatches 16 --bandwidth 10Gbit --tensor-parallel 2 --memory 10GB"
    found = plan(capsys, 0, words)
    grids = [f"pipeline_custom {stages} x {32 // stages} x 2" for stages in (32, 16, 8, 4, 2)]
    assert [row["strategy"] for row in found["estimates"]] == ["zero3_custom", *grids]
    # Four ranks with other data divide an eighth of the model, and share its layers by twos: all on one node.
    one = found[grids[2]]
    assert one["held_bytes"] == pytest.approx(16 * 10**9 / 64) and one["fits"]
    passed = 2 * 8e6 * 8 / (10e9 / 8)
    assert one["sending_seconds"] == pytest.approx(passed)
    assert one["step_seconds"] == pytest.approx(23 / 16 * (1 / 16 + passed))
    # With two stages, those with other data are on four nodes.
    gradients = 2 * 3 / 4 * 4 * 10**9 / 4 * 2 / (10e9 / 8)
    assert found[grids[4]]["sending_seconds"] == pytest.approx(passed / 2 + gradients)
    assert found["recommended"] == "pipeline_custom"
    best = max(grids, key=lambda name: found[name]["speed_up"])
    assert f"data_parallel_size={best.split()[3]}, tensor_parallel_size=2)" in found["why"]


@pytest.mark.parametrize(("text", "count"), [("7b", 7 * 10**9), ("350M", 350 * 10**6)])
def test_numbers_of_parameters(capsys: pytest.CaptureFixture[str], text: str, count: int) -> None:
    assert plan(capsys, 0, f"--parameters {text} --world-size 2")["ddp"]["held_bytes"] == 20 * count
    assert main(["plan", "--world-size", "2", "--parameters", "7bit"]) == 2
    assert "write a number such as 7B" in capsys.readouterr().err
