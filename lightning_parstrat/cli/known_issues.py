"""Known issues of Lightning on clusters, and how to detect them beforehand.

Each check looks only at its arguments (a job file, a program's configuration, an environment) and says which line to
change. Numbers are those of Lightning's issues.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_parstrat._namespaces import PUBLIC
from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.facts import Interface
from lightning_parstrat.cli.program import Program, Setting, is_torchrun, read_program
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.core.wording import counted

# Interfaces of containers and virtual machines: they lead to no other node.
_VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "tun", "tap")


class JobFile(NamedTuple):
    """A Slurm job file.

    Attributes:
        directives: By long option: the value, and the line in which it is written.
        commands: The words of each command.
    """

    directives: Mapping[str, Setting]
    commands: Sequence[Sequence[str]]

    @property
    def words(self) -> list[str]:
        """The words of all commands."""
        return [word for command in self.commands for word in command]


class Situation(NamedTuple):
    """The input of the checks.

    Attributes:
        environment: Variables of the process.
        job_file: The job file, if there is one.
        program: The training program, from the job file or from the command line.
        interfaces: The network interfaces.
    """

    environment: Mapping[str, str]
    job_file: JobFile | None
    program: Program | None
    interfaces: Sequence[Interface]

    def directive(self, name: str) -> Setting | None:
        """The job file's value of an option."""
        return None if self.job_file is None else self.job_file.directives.get(name)

    @property
    def in_slurm(self) -> bool:
        """Whether this is about a Slurm job."""
        return self.job_file is not None or "SLURM_JOB_ID" in self.environment

    @property
    def strategy(self) -> str | None:
        """The Trainer's strategy, where the configuration says one: its name, or the path of its class."""
        setting = None if self.program is None else self.program.settings.get("strategy")
        value = None if setting is None else setting.value
        return value.get("class_path") if isinstance(value, Mapping) else value

    @property
    def saves_between_batches(self) -> bool:
        """Whether the strategy is one of this package."""
        known = self.strategy or ""
        stages = [name for stage in (1, 2, 3) for name in (f"zero{stage}_custom", f"ddp_zero{stage}")]
        # A command line knows the classes by their short names, too.
        return known.startswith(("ddp_tuned", *stages, "lightning_parstrat.", *PUBLIC))


class Finding(NamedTuple):
    """A known issue that would occur.

    Attributes:
        issue: Its name.
        what: What would happen, and why.
        change: The line to change, and into what.
    """

    issue: str
    what: str
    change: str


def read_job_file(path: Path) -> JobFile:
    """Reads the directives and commands of a job file.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"--job-file {path}: {error.strerror}") from error
    directives: dict[str, Setting] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            # Slurm ignores directives after the first command.
            break
        if line.startswith("#SBATCH"):
            for name, value in _options_of(line.removeprefix("#SBATCH")):
                directives[name] = Setting(value, f"{path.name}, line {number}: {line.strip()}")
    return JobFile(directives, _commands(text))


def _options_of(line: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    for position, word in enumerate(words):
        following = words[position + 1] if position + 1 < len(words) else "-"
        following = "" if following.startswith("-") else following
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            yield name, value if equals else following
        elif word.startswith("-") and len(word) > 1:
            yield _SHORT.get(word[1], word[1]), word[2:].removeprefix("=") or following


def _commands(text: str) -> list[list[str]]:
    """The words of each command; an array in parentheses counts as one command."""
    lines = re.sub(r"\([^()]*\)", lambda found: found[0].replace("\n", " "), text.replace("\\\n", " ")).splitlines()
    commands = []
    for line in lines:
        if line.lstrip().startswith("#"):
            continue
        try:
            words = list(shlex.shlex(line, posix=True, punctuation_chars=";|&<>"))
        except ValueError:
            words = line.split()
        command: list[str] = []
        for word in words:
            if re.fullmatch(r"[;|&<>]+", word):
                commands.append(command)
                command = []
            else:
                command.append(word.removeprefix("program=(") if "=(" in word else word)
        commands.append(command)
    return [command for command in commands if command]


_SHORT = {"n": "ntasks", "N": "nodes", "c": "cpus-per-task", "t": "time", "p": "partition", "G": "gpus"}


def program_of(job_file: JobFile, folder: Path) -> Program:
    """The program that a job file starts, as far as can be seen: what srun starts, or else the first Python file."""
    for wanted in ("srun", None):
        for command in job_file.commands:
            words = [word for word in command if word not in ("(", ")")]
            starts = any(re.fullmatch(r"\S+\.py", word) or is_torchrun(word) for word in words)
            if starts and (wanted is None or wanted in words):
                return read_program(words, folder, strict=False)
    return read_program((), folder, strict=False)


def find_known_issues(situation: Situation) -> list[Finding]:
    """All known issues that would occur."""
    return [finding for check in KNOWN_ISSUES.values() for finding in check(situation)]


def _saves_in_signal_handler(situation: Situation) -> list[Finding]:
    """Lightning 21406."""
    asked = situation.directive("signal")
    if not situation.in_slurm or situation.strategy is None or situation.saves_between_batches:
        return []
    if situation.job_file is not None and asked is None:
        return []
    source = situation.program.settings["strategy"].source if situation.program else ""
    return [
        Finding(
            "checkpoint in a signal handler",
            f"When the job is preempted, Lightning saves at once under strategy {situation.strategy!r}: in the middle"
            " of a step or of a collective, where ranks can wait for each other forever, or write half a checkpoint.",
            f"{source}\n  -> strategy: zero1_custom, or ddp_tuned, which save at the end of a batch",
        )
    ]


def _sigterm(situation: Situation) -> list[Finding]:
    """Lightning 20806."""
    asked = situation.directive("signal")
    if asked is None:
        return []
    signal, _, seconds = str(asked.value).partition("@")
    seconds = seconds or "90"
    findings = []
    # Slurm takes names with and without SIG, and numbers, behind optional letters such as B.
    if "TERM" in signal.upper() or re.fullmatch(r"(.*:)?15", signal):
        what = (
            "At SIGTERM, Lightning makes each rank wait for the others in a broadcast, wherever it is: ranks that did"
            " not get the signal, or are within another collective, never come. It does not requeue, either."
        )
        findings.append(
            Finding("SIGTERM as a warning", what, f"{asked.source}\n  -> #SBATCH --signal=SIGUSR1@{seconds}")
        )
    # A shell that traps the signal can pass it on to the ranks.
    handles_it_itself = situation.job_file is not None and "trap" in situation.job_file.words
    if signal.upper().startswith(("B:", "BR:", "RB:")) and not handles_it_itself:
        what = "With `B:` the signal goes to the job's shell alone; no rank gets it, so nothing is saved or requeued."
        findings.append(
            Finding("signal to the shell alone", what, f"{asked.source}\n  -> #SBATCH --signal=SIGUSR1@{seconds}")
        )
    return findings


def _tasks(situation: Situation) -> list[Finding]:
    """Lightning 20056 and 20391."""
    findings = []
    program, environment = situation.program, situation.environment
    devices = None if program is None else program.count("devices")
    nodes = None if program is None else program.count("num_nodes")
    all_tasks, per_node = situation.directive("ntasks"), situation.directive("ntasks-per-node")
    wanted = f"#SBATCH --ntasks-per-node={devices or '<devices of a node>'}"
    if all_tasks is not None and per_node is None and all_tasks.value != "1":
        what = (
            f"--ntasks counts the tasks of all nodes, and Slurm may place them unevenly; Lightning compares"
            f" --ntasks-per-node with the Trainer's devices, and finds none. Each node needs"
            f" {counted(devices, 'task') if devices else 'as many tasks as devices'}."
        )
        findings.append(Finding("--ntasks", what, f"{all_tasks.source}\n  -> {wanted}"))
    in_job = "SLURM_JOB_ID" in environment and situation.job_file is None
    found = per_node or (
        Setting(environment["SLURM_NTASKS_PER_NODE"], f"SLURM_NTASKS_PER_NODE={environment['SLURM_NTASKS_PER_NODE']}")
        if in_job and "SLURM_NTASKS_PER_NODE" in environment
        else None
    )
    if in_job and found is None and environment.get("SLURM_NTASKS", "1") != "1":
        source = f"SLURM_NTASKS={environment['SLURM_NTASKS']}, and no SLURM_NTASKS_PER_NODE"
        what = "The job was submitted with --ntasks, which counts all nodes' tasks. Lightning needs those of one node."
        findings.append(Finding("--ntasks", what, f"{source}\n  -> {wanted}"))
    has_launcher = program is not None and program.launcher is not None
    if has_launcher and found is not None and str(found.value) == "1":
        # One task per node is right: the launcher starts the node's ranks itself.
        found = None
    if found is not None and devices is not None and str(devices) != str(found.value):
        source = program.settings["devices"].source if program else ""
        tasks = counted(int(found.value), "task") if str(found.value).isdecimal() else f"{found.value} tasks"
        what = f"Each node starts {tasks} for {counted(devices, 'device')}. Each device needs a task of its own."
        findings.append(Finding("tasks and devices", what, f"{found.source}\n{source}\n  -> {wanted}"))
    asked = situation.directive("nodes") or (
        Setting(environment["SLURM_NNODES"], f"SLURM_NNODES={environment['SLURM_NNODES']}")
        if in_job and "SLURM_NNODES" in environment
        else None
    )
    if asked is not None and nodes is not None and str(nodes) != str(asked.value):
        source = program.settings["num_nodes"].source if program else ""
        what = f"The job asks for nodes={asked.value}, but the Trainer for num_nodes={nodes}."
        findings.append(Finding("nodes", what, f"{asked.source}\n{source}\n  -> #SBATCH --nodes={nodes}"))
    return findings


def _one_device_per_task(situation: Situation) -> list[Finding]:
    """Lightning 16828."""
    what = (
        "Each task would see only one device, as number 0: Lightning looks for as many as the node has tasks, and NCCL"
        " cannot use the link between them."
    )
    devices = None if situation.program is None else situation.program.count("devices")
    wanted = f"#SBATCH --gpus-per-node={devices or '<devices of a node>'}"
    bound = situation.directive("gpu-bind")
    if bound is not None and str(bound.value).startswith("none"):
        return []
    for name in ("gpus-per-task", "gpu-bind"):
        asked = situation.directive(name)
        if asked is not None:
            return [Finding("one device per task", what, f"{asked.source}\n  -> {wanted}")]
    if situation.job_file is None:
        environment = situation.environment
        tasks = environment.get("SLURM_NTASKS_PER_NODE", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if "SLURM_GPUS_PER_TASK" in environment:
            source = f"SLURM_GPUS_PER_TASK={environment['SLURM_GPUS_PER_TASK']}"
            return [Finding("one device per task", what, f"{source}\n  -> {wanted}, without --gpus-per-task")]
        if "SLURM_STEP_ID" in environment and visible and "," not in visible and tasks not in ("", "1"):
            source = f"CUDA_VISIBLE_DEVICES={visible} in a task of {tasks} on its node"
            return [Finding("one device per task", what, f"{source}\n  -> {wanted}")]
    return []


def _torchrun(situation: Situation) -> list[Finding]:
    """Lightning 18466."""
    words = [] if situation.job_file is None else list(situation.job_file.words)
    words += [] if situation.program is None else list(situation.program.command)
    launcher = next((word for word in words if is_torchrun(word)), None)
    if launcher is None and "TORCHELASTIC_RUN_ID" in situation.environment:
        launcher = "torchrun"
    if launcher is None or not situation.in_slurm or situation.saves_between_batches:
        return []
    strategy = situation.strategy or "of its default"
    what = (
        f"Under {launcher} Lightning ignores Slurm: with strategy {strategy!r}, a job that is preempted is neither"
        " saved nor requeued."
    )
    change = (
        f"{launcher} ...\n  -> srun python ..., with #SBATCH --ntasks-per-node=<devices of a node>; or strategy"
        " zero1_custom or ddp_tuned, which requeue under it, too"
    )
    return [Finding("torchrun in Slurm", what, change)]


def _hpc_checkpoint(situation: Situation) -> list[Finding]:
    """Lightning 20347 and 12369."""
    program = situation.program
    if program is None:
        return []
    findings = []
    checkpoint = program.settings.get("ckpt_path")
    if checkpoint is not None and checkpoint.value == "hpc":
        what = "A first run has no such checkpoint, and Lightning refuses to start. A requeued run resumes without it."
        findings.append(Finding('ckpt_path "hpc"', what, f"{checkpoint.source}\n  -> leave it out"))
    if situation.job_file is not None and situation.directive("no-requeue") is None:
        folder = program.settings.get("default_root_dir")
        if program.has_lightning_cli and (folder is None or "$" not in str(folder.value)):
            what = (
                "A preempted job saves in default_root_dir, and the next job that starts there resumes from it, even if"
                " it is a different one."
            )
            source = "no --trainer.default_root_dir" if folder is None else folder.source
            change = f'{source}\n  -> --trainer.default_root_dir="runs/slurm-$SLURM_JOB_ID"'
            findings.append(Finding("jobs that share a folder", what, change))
    return findings


def _interfaces(situation: Situation) -> list[Finding]:
    chosen = [name for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name in situation.environment]
    physical = [one for one in situation.interfaces if not one.name.startswith(_VIRTUAL)]
    # Outside of a job these are a login node's interfaces; within one node no interface is used.
    in_job = situation.environment.get("SLURM_NNODES", "1") != "1"
    if not in_job or len(physical) < 2 or chosen:
        return []
    names = ", ".join(
        f"{one.name}{'' if one.megabits_per_second is None else f' ({one.megabits_per_second} Mbit/s)'}"
        for one in physical
    )
    fastest = max(physical, key=lambda one: one.megabits_per_second or 0).name
    what = f"This node has several network interfaces ({names}). Gloo takes the one that its host name resolves to."
    change = f"-> export GLOO_SOCKET_IFNAME={fastest} NCCL_SOCKET_IFNAME={fastest}"
    return [Finding("several interfaces", what, change)]


def _shard_groups(situation: Situation) -> list[Finding]:
    program = situation.program
    setting = None if program is None else program.settings.get("strategy")
    if program is None or setting is None or not isinstance(setting.value, Mapping):
        return []
    group = (setting.value.get("init_args") or {}).get("shard_group", "all")
    devices, nodes = program.count("devices"), program.count("num_nodes") or 1
    if devices is None:
        return []
    try:
        ShardingPolicy(shard_group=group)
        ShardGroups.chosen(group, Topology(tuple(rank // devices for rank in range(devices * nodes))))
    except ValueError as error:
        change = f"{setting.source}\n  -> shard_group: node, or a number that divides {devices * nodes}"
        return [Finding("shard groups", f"The training would end before its first step: {error}", change)]
    return []


KNOWN_ISSUES: Mapping[str, Callable[[Situation], list[Finding]]] = {
    "checkpoint in a signal handler": _saves_in_signal_handler,
    "SIGTERM": _sigterm,
    "tasks of a node": _tasks,
    "one device per task": _one_device_per_task,
    "torchrun in Slurm": _torchrun,
    "checkpoints of preempted jobs": _hpc_checkpoint,
    "several interfaces": _interfaces,
    "shard groups": _shard_groups,
}
"""The checks by their subject."""
