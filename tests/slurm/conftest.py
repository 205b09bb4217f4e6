"""The cluster is started once for all its tests. What is missing is a reason to skip, unless the tests are required."""

import os
from collections.abc import Iterator

import pytest

from tests.slow import lack
from tests.slurm.cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if os.geteuid() != 0:
        lack("needs root, for daemons and /etc/hosts")
    missing = missing_programs()
    if missing:
        lack(f"needs {', '.join(missing)}: make test-cluster installs them")
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    yield slurm
    slurm.cancel_everything()
