"""What this package adds to each ``import torch``: its hook in new processes.

::

    python -m benchmarks.import_hook --output benchmarks/results/import_hook.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import write_result

_HOOK = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
from lightning_parstrat._autoload import autoload
autoload()
print(json.dumps([time.perf_counter() - start, sorted(set(sys.modules) - before)]))
"""


def main() -> None:
    """Times the hook, and prints the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    command = [sys.executable, "-c", _HOOK]
    # The hook runs at the end of `import torch`, unless that is switched off. Here it is, and the hook is called.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    runs = [
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment) for _ in range(arguments.processes)
    ]
    seconds, imported = zip(*[json.loads(run.stdout) for run in runs], strict=True)
    print(f"{1000 * statistics.median(seconds):.2f} ms ({1000 * min(seconds):.2f} to {1000 * max(seconds):.2f})")
    write_result({"seconds": sorted(seconds), "imported": imported[0]}, arguments.output)


if __name__ == "__main__":
    main()
