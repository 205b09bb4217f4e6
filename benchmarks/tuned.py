"""What `lightning-parstrat tune` chooses for the GPT, beside an exhaustive run, which leaves no candidate out.

    sudo python -m benchmarks.tuned --rate 1gbit --output tuned.json

Without a rate, two ranks of one machine train. The ratio is that of the chosen candidate's time in an exhaustive run to
the best time there. The exhaustive run takes long on a slow link: each candidate runs.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import describe_machine
from lightning_parstrat.cli import tune
from lightning_parstrat.cli.main import main as run_command

_ROW = re.compile(r"(?P<strategy>\w+(?:, \w+=\w+)*) +(?P<predicted>\d+\.\d+) s *(?:(?P<measured>\d+\.\d+) s)?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of the link between two nodes, such as 1gbit")
    parser.add_argument("--steps", type=int, default=25, help="of each run")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tuned = _tune(Path(folder), arguments)
        # Nothing is predicted to be too slow.
        tune._SLACK = 0.0
        every = _tune(Path(folder), arguments)
    tuned["chosen_by_best"] = _chosen_by_best(tuned["chosen"], every["rows"])
    print(f"{tuned['chosen']}: {tuned['chosen_by_best']:.3f} of the best in an exhaustive run")
    result = {"machine": describe_machine(), "rate": arguments.rate, "tune": tuned, "exhaustive": every}
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def _chosen_by_best(chosen: str, rows: list[dict[str, Any]]) -> float:
    """The time of a candidate by the best of all. The best is measured twice, and has the mean."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["measured"] is not None:
            times.setdefault(row["strategy"], []).append(row["measured"])
    means = {name: statistics.mean(several) for name, several in times.items()}
    return means[chosen] / min(means.values())


def _rows(text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [found.groupdict() for line in text.splitlines() if (found := _ROW.match(line))]
    for row in rows:
        row.update({key: float(row[key]) for key in ("predicted", "measured") if row[key] is not None})
    return rows


def _tune(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows that were printed, what was chosen, and the seconds that it took."""
    ranks = {"num_nodes": 2, "devices": 1} if arguments.rate else {"devices": 2}
    config = folder / "gpt.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "gradient_clip_val": 1.0, **ranks}}))
    nodes = ["-m", "benchmarks.two_nodes", "--rate", arguments.rate, "--", sys.executable] if arguments.rate else []
    program = [sys.executable, *nodes, "-m", "benchmarks.gpt_cli", "fit", "--config", str(config)]
    options = ["--steps", str(arguments.steps), "--output", str(folder / "chosen.yaml")]
    began = time.perf_counter()
    with redirect_stdout(StringIO()) as printed:
        code = run_command(["tune", *options, "--", *program])
    seconds = time.perf_counter() - began
    text = printed.getvalue()
    print(text, flush=True)
    if code:
        sys.exit(code)
    chosen = re.findall(r"^Fastest: (.*?)\. ", text, re.MULTILINE)[0]
    return {"seconds": round(seconds), "chosen": chosen, "rows": _rows(text)}


if __name__ == "__main__":
    main()
