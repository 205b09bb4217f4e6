"""What a training costs on a GPU: step time, launches, host time and peak memory of each strategy.

    python3 benchmarks/gpu/run.py --output benchmarks/results/gpu.json
    python3 benchmarks/gpu/run.py --rows world1-1.3b fake512 --budget-seconds 540
    python3 benchmarks/gpu/run.py --device cpu --model tiny

Needs neither a virtual environment nor an installed package: torch, either of Lightning's packages, and this folder.
`program.py` has the options; `rows.py` says what there is to measure.
"""

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Goes on as a module of the repository, whatever the folder and the interpreter that this was started with."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.setdefault("PARSTRAT_BENCHMARK_COMMAND", shlex.join(["python3", *sys.argv]))
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu.program", *sys.argv[1:]])


if __name__ == "__main__":
    main()
