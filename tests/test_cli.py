"""The strategies under Lightning's own command line, whose parser reads their signatures.

``test_examples.py`` trains by it.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy
from lightning_parstrat.core.policy import DivisionPolicy

TRAINER = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "limit_train_batches": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}
# Every one of the four parameters is larger, so each has a bucket of its own.
SMALL_CAP = 1e-6
CLASS_PATH = "lightning_parstrat.ZeRO1Strategy"

Parse = Callable[..., LightningCLI]


def class_path(**init_args: Any) -> dict[str, Any]:
    return {"class_path": CLASS_PATH, "init_args": init_args}


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Reads a configuration and builds the Trainer, as a program does before it trains; it trains nothing."""

    def run(strategy: Any, *arguments: str) -> LightningCLI:
        config = tmp_path / "given.yaml"
        config.write_text(yaml.safe_dump({"trainer": {**TRAINER, "devices": 1, "strategy": strategy}}))
        monkeypatch.setattr("sys.argv", ["program", "--config", str(config), *arguments])
        return LightningCLI(BoringModel, run=False, seed_everything_default=False)

    return run


def test_the_command_line_comes_before_the_file(parse: Parse) -> None:
    argument = "--trainer.strategy.init_args.bucket_cap_mb=2"
    by_class = parse("ddp", f"--trainer.strategy.class_path={CLASS_PATH}", argument).trainer.strategy
    one_argument = parse(class_path(bucket_cap_mb=SMALL_CAP), argument).trainer.strategy
    for built in (by_class, one_argument):
        assert isinstance(built, ZeRO1Strategy) and built._policy.bucket_cap_mb == 2
    assert isinstance(parse("ddp", "--trainer.strategy=ddp_tuned").trainer.strategy, TunedDDPStrategy)


def test_sizes_of_buckets_may_be_given_in_all_ways(parse: Parse) -> None:
    sizes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"bucket_cap_mb": "auto", "tune_steps": 4, "comm_hook": "bf16"}, {}),
        ({"bucket_cap_mb": 8}, {"bucket_cap_mb": 8.0}),
        ({"bucket_cap_mb": [1.0, 4.0]}, {"bucket_cap_mb_list": [1.0, 4.0]}),
    ]
    for given, expected in sizes:
        built = parse({"class_path": "lightning_parstrat.TunedDDPStrategy", "init_args": given}).trainer.strategy
        assert isinstance(built, TunedDDPStrategy)
        # The parser gives every argument of DDP: what is no choice must not look like one.
        names = ("bucket_cap_mb", "bucket_cap_mb_list")
        assert {name: built._ddp_kwargs[name] for name in names if name in built._ddp_kwargs} == expected


DIVIDED = {"rank_shares": [3.0, 1.0], "max_share": 1.5, "keep_global_batch": True}


@pytest.mark.parametrize("name", ["TunedDDPStrategy", "ZeRO1Strategy", "ZeRO2Strategy", "ZeRO3Strategy"])
def test_samples_may_be_divided_in_all_ways(name: str, parse: Parse) -> None:
    by_file = parse({"class_path": f"lightning_parstrat.{name}", "init_args": DIVIDED})
    line = [f"--trainer.strategy.{argument}={value}" for argument, value in DIVIDED.items()]
    for built in (by_file, parse("ddp", f"--trainer.strategy={name}", *line)):
        assert built.trainer.strategy._shares._policy == DivisionPolicy(**DIVIDED)
    for wrong in ("fast", "[3,none]"):
        with pytest.raises(SystemExit):
            parse("ddp", f"--trainer.strategy={name}", f"--trainer.strategy.rank_shares={wrong}")


SHARED: dict[str, dict[str, Any]] = {
    "ZeRO3Strategy": {
        "shard_group": "node",
        "tensor_parallel_size": 2,
        "activation_checkpointing_policy": ["Block"],
    },
    "PipelineStrategy": {
        "stages": [5, 3],
        "schedule": "gpipe",
        "microbatches": 8,
        "auto_wrap_policy": ["Block"],
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "shard": "parameters",
    },
}


@pytest.mark.parametrize("name", SHARED)
def test_a_module_may_be_divided_in_all_ways(name: str, parse: Parse) -> None:
    by_file = parse({"class_path": f"lightning_parstrat.{name}", "init_args": SHARED[name]})
    line = [f"--trainer.strategy.{argument}={value}" for argument, value in SHARED[name].items()]
    for built in (by_file, parse("ddp", f"--trainer.strategy={name}", *line)):
        policy = built.trainer.strategy._policy
        assert {argument: getattr(policy, argument) for argument in SHARED[name]} == SHARED[name]


REFUSED: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = [
    ({"class_path": "lightning_parstrat.ZeRO4Strategy"}, (), ("ZeRO4Strategy",)),
    (class_path(bucket_cap_mb="large"), (), ("'large'",)),
    (class_path(), ("--trainer.strategy.init_args.partition=rows",), ("rows", "auto", "element", "parameter")),
    (class_path(comm_dtype="fp8"), (), ("fp8", "bf16")),
    (class_path(start_method="thread"), (), ("thread", "popen", "spawn", "fork", "forkserver")),
]


def test_the_parser_refuses_and_names_what_is_allowed(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    for strategy, arguments, said in REFUSED:
        with pytest.raises(SystemExit) as refused:
            parse(strategy, *arguments)
        printed = capsys.readouterr().err
        assert refused.value.code == 2 and all(word in printed for word in said), printed


def test_help_lists_the_strategies_and_none_of_their_base_classes(
    parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("ddp", "--help")
    listed = re.findall(r"lightning_parstrat[\w.]*\.(\w+Strategy)\b", "".join(capsys.readouterr().out.split()))
    assert sorted(set(listed)) == [
        "AutoStrategy",
        "PipelineStrategy",
        "TunedDDPStrategy",
        "ZeRO1Strategy",
        "ZeRO2Strategy",
        "ZeRO3Strategy",
    ]


@pytest.mark.parametrize("strategy", [ZeRO1Strategy, ZeRO2Strategy, TunedDDPStrategy])
def test_help_has_a_sentence_for_every_argument(
    strategy: type[Any], parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("ddp", f"--trainer.strategy.help=lightning_parstrat.{strategy.__name__}")
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    own = {
        name: parameter
        for cls in strategy.__mro__
        if cls.__module__.startswith("lightning_parstrat.") and "__init__" in vars(cls)
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name != "self" and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    assert len(own) >= 8
    # `ZeRO2Strategy` has a value for it already.
    assert ("shard_gradients" in said) == (own.pop("shard_gradients", None) is not None and strategy is ZeRO1Strategy)
    for name, parameter in own.items():
        # Option, what it takes, a sentence, type and default.
        default = "(None|null|NoneType)" if parameter.default is None else ".*?"
        line = rf"--trainer\.strategy\.{name} \S.*? [A-Z`\"][^()]{{10,}}.*?\(.*?default: {default}"
        assert re.search(line, said), name


@pytest.mark.parametrize(
    "strategy",
    [
        "zero1_custom",
        "zero2_custom",
        class_path(bucket_cap_mb=2.0, partition="parameter", max_inflight_buckets=3, comm_dtype="bf16"),
    ],
)
def test_a_printed_configuration_can_be_given_again(
    tmp_path: Path, strategy: Any, parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    given = strategy
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            parse(given, "--print_config")
        assert ended.value.code == 0
        printed.append(yaml.safe_load(capsys.readouterr().out))
        given = printed[-1]["trainer"]["strategy"]
    assert printed[0] == printed[1]
    built = parse(given).trainer.strategy
    assert isinstance(built, ZeRO1Strategy)
    if isinstance(strategy, dict):
        policy = built._policy
        assert (policy.bucket_cap_mb, policy.partition, policy.max_inflight_buckets) == (2.0, "parameter", 3)
