"""A fake Slurm of one machine: `sbatch`, `srun` and `scontrol` with the features that deploy/slurm/ uses.

It behaves like real Slurm where it matters: the batch script runs from a copy in a spool folder, with the variables of
sbatch; `srun` sets those of each task, with all "nodes" on 127.0.0.1; a signal goes to the tasks, that is, to the
processes started by srun, not to the script or their children; `scontrol requeue` requires `--requeue`, and the script
then runs again with a greater SLURM_RESTART_COUNT; the tasks of an array run one after the other, after the arrays on
which it depends. An unknown option is an error.

FAKE_SLURM contains `job.json`, the submitted options; `tasks.json`, the process ids of the running step; `requeue`, if
the job will be requeued; `steps.jsonl`, the options of every srun; `arrays.jsonl`, the id, dependency and exit code of
every array.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

OPTIONS = {
    "sbatch": {
        *("job-name", "nodes", "ntasks", "cpus-per-task", "gpus-per-node", "time", "signal", "open-mode", "output"),
        *("array", "dependency"),
    },
    "srun": {"ntasks", "ntasks-per-node", "cpus-per-task", "cpu-bind", "kill-on-bad-exit"},
}
FLAGS = {"sbatch": {"exclusive", "requeue", "parsable"}, "srun": set()}


def parse(command: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The leading options, and the remaining arguments."""
    options = {}
    while words and words[0].startswith("--"):
        name, equals, value = words.pop(0)[2:].partition("=")
        if name in FLAGS[command]:
            options[name] = "yes"
        elif name in OPTIONS[command]:
            options[name] = value if equals else words.pop(0)
        else:
            sys.exit(f"{command}: unrecognized option '--{name}'")
    return options, words


def sbatch(words: list[str]) -> int:
    """Run the job until it is not requeued. -> the exit code of its last run"""
    state = Path(os.environ["FAKE_SLURM"])
    given, (script, *arguments) = parse("sbatch", words)
    lines = Path(script).read_text().splitlines()
    written = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    options = parse("sbatch", written)[0] | given
    spooled = state / "slurm_script"
    shutil.copy(script, spooled)
    (state / "job.json").write_text(json.dumps(options))
    environment = os.environ | {
        "SLURM_JOB_ID": os.environ["FAKE_SLURM_JOB_ID"],
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_JOB_NUM_NODES": options.get("nodes", "1"),
    }
    if "gpus-per-node" in options:
        environment["SLURM_GPUS_ON_NODE"] = options["gpus-per-node"]
    if "cpus-per-task" in options:
        environment["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    command = ["bash", str(spooled), *arguments]
    if "array" in options:
        return _array(state, options, command, environment)
    return _until_not_requeued(state, command, environment)


def _until_not_requeued(state: Path, command: list[str], environment: dict[str, str]) -> int:
    count = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    while True:
        if count:
            environment["SLURM_RESTART_COUNT"] = str(count)
        code = subprocess.call(command, env=environment, stdout=sys.stderr)
        if not (state / "requeue").exists():
            return code
        (state / "requeue").unlink()
        count += 1


def _array(state: Path, options: dict[str, str], command: list[str], environment: dict[str, str]) -> int:
    """Run the tasks of an array in turn; none if an array on which it depends has failed. -> 0, as it was submitted"""
    first, last = map(int, options["array"].split("-"))
    log = state / "arrays.jsonl"
    before = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    code, after = 0, options.get("dependency")
    if after is not None:
        kind, job = after.split(":")
        assert kind == "afterok", after
        (code,) = [array["code"] for array in before if array["id"] == job]
    tasks = range(first, last + 1) if code == 0 else ()
    for task in tasks:
        environment |= {"SLURM_ARRAY_TASK_ID": str(task)}
        code = max(code, _until_not_requeued(state, command, dict(environment)))
    entry = {"id": str(1000 + len(before)), "dependency": after, "tasks": len(tasks), "code": code}
    with open(log, "a") as file:
        file.write(json.dumps(entry) + "\n")
    print(entry["id"])
    return 0


def srun(words: list[str]) -> int:
    """Start the tasks and wait for all. -> the highest exit code, 128 + number for a signal"""
    state = Path(os.environ["FAKE_SLURM"])
    options, command = parse("srun", words)
    with open(state / "steps.jsonl", "a") as file:
        file.write(json.dumps(options) + "\n")
    tasks = int(options.get("ntasks", 1))
    per_node = int(options.get("ntasks-per-node", tasks))
    processes = []
    for number in range(tasks):
        place = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_STEP_NUM_NODES": str(tasks // per_node),
            "SLURM_NTASKS": str(tasks),
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_PROCID": str(number),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{tasks // per_node})" if tasks > per_node else str(per_node),
            "SLURM_NODEID": str(number // per_node),
            "SLURM_LOCALID": str(number % per_node),
        }
        processes.append(subprocess.Popen(command, env=os.environ | place))
    (state / "tasks.json").write_text(json.dumps([process.pid for process in processes]))
    codes = [process.wait() for process in processes]
    (state / "tasks.json").unlink()
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(words: list[str]) -> int:
    state = Path(os.environ["FAKE_SLURM"])
    assert words == ["requeue", os.environ["SLURM_JOB_ID"]], words
    if "requeue" not in json.loads((state / "job.json").read_text()):
        sys.exit("scontrol: error: Requested operation is presently disabled")
    (state / "requeue").touch()
    return 0


def install(folder: Path, job: int) -> dict[str, str]:
    """Create the three commands in `folder/bin`. -> the environment that finds them"""
    (folder / "bin").mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        shim = folder / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        shim.chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "FAKE_SLURM": str(folder), "FAKE_SLURM_JOB_ID": str(job)}


def warn(folder: Path) -> None:
    """Send the running tasks the signal that the job requested."""
    name, seconds = json.loads((folder / "job.json").read_text())["signal"].split("@")
    assert int(seconds) >= 60, "too short for a save"
    for process in json.loads((folder / "tasks.json").read_text()):
        os.kill(process, signal.Signals[f"SIG{name}"])


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
