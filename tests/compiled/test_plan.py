"""`lmtrain plan` with the compilers: runs that do not fit, limits, concurrency, kinds of devices, hosts and slices."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from compiled.plans import plan, run

NANO = ("gpt2_nano", "--model.num_layers", "1")
TWO = ("--model.num_layers", "2")
AT_ONCE = ("--model.gradient_checkpointing", "true", "--trainer.per_device_parallelism", "-1")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ("llama2_7b", *TWO, *AT_ONCE, "--trainer.train_batch_size", "256", "--device", "l4", "--devices", "8"),
            marks=pytest.mark.long,
        ),
        # twice a prime number, so that few sizes are tried
        ("gpt2_nano", "--model.num_layers", "1", "--trainer.train_batch_size", "32762", "--device", "v5e"),
    ],
    ids=["gpu", "tpu"],
)
def test_a_run_that_does_not_fit_prints_a_setting_that_does(flags):
    done = run(*flags, "--step", "train")
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("largest that fits"))
    pasted = yaml.safe_load("\n".join(line[2:] for line in lines[at + 1 : at + 3]))
    size = pasted["trainer"]["per_device_parallelism"]
    assert plan(*flags, "--step", "train", "--per_device_parallelism", str(size))["fits"]
    assert not plan(*flags, "--step", "train")["fits"]


def test_two_plans_at_once_work():
    """Those of two of the kinds below."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda kind: plan(*NANO, "--device", kind, "--step", "train"), ("v4", "v6e")))
    for found in both:
        assert found["memory"]["peak"] > 0


def test_the_compilers_change_nothing_for_a_run_on_this_machine(tmp_path):
    """They are installed without a device: JAX must neither look for one nor print errors."""
    program = "from lmtrain.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "gpt2_nano", "--devices", "1", "--step", "train"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=_without_platform(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout
    assert "plugin" not in done.stderr
    assert "TPU" not in done.stderr


def _without_platform(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return {**kept, "XDG_CACHE_HOME": str(folder)}


@pytest.mark.parametrize(
    ("flags", "network", "axes"),
    [
        (("--device", "h100", "--devices", "4", "--hosts", "2"), "DCN", ["replica"]),
        (("--device", "v5e-4", "--slices", "2"), "DCN", ["replica"]),
    ],
    ids=["two hosts of GPUs", "two slices of TPUs"],
)
def test_replicas_on_hosts_and_slices_communicate_over_the_slow_network(flags, network, axes):
    found = plan(*NANO, *flags, "--step", "train", "--replica_dcn_axis_size", "2")
    assert found["mesh"]["replica"] == 2
    slow = [row for row in found["collectives"] if row["network"] == network]
    assert slow
    assert any(row["axes"] == axes for row in slow)
    fast = [row for row in found["collectives"] if row["network"] != network]
    assert all("replica" not in row["axes"] for row in fast)


def test_a_slice_of_several_hosts_has_one_network():
    found = plan(*NANO, "--device", "v5e", "--topology", "2x4", "--step", "train", "--replica_dcn_axis_size", "-1")
    assert found["mesh"] == {"replica": 1, "data": 8, "expert": 1, "context": 1, "model": 1}
    assert {row["network"] for row in found["collectives"]} == {"ICI"}


def readme_plans() -> list[str]:
    text = (Path(__file__).parent.parent.parent / "README.md").read_text()
    return re.findall(r"^lmtrain plan (llama3_8b .*)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=pytest.mark.long if "v5p" in one else ()) for one in readme_plans()],
)
def test_the_commands_of_the_readme_run_as_written(command, tmp_path):
    """With a small model and, since a search uses all of its time, a limit of half a minute."""
    shorter = [*TWO, "--model.hidden_dim", "1024", "--model.num_heads", "8", "--model.seq_len", "1024"]
    shorter += ["--minutes", "0.5"] if "--search" in command else ["--step", "train"]
    done = run(*command.split(), *shorter, folder=str(tmp_path))
    assert done.returncode in (0, 1), done.stderr
    if "--search" in command and done.returncode == 0:
        assert isinstance(yaml.safe_load(done.stdout), dict | None)
        assert "were not tried" in done.stdout
    else:
        assert "fit" in done.stdout


@pytest.mark.long
def test_settings_that_search_finds_are_accepted_by_the_compiler(tmp_path):
    flags = ("--device", "l4", "--devices", "4", "--trainer.train_batch_size", "16")
    done = run(*NANO, *flags, "--search", "--minutes", "0.3", folder=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    for section, values in (found or {}).items():
        flags += tuple(part for name, value in values.items() for part in (f"--{section}.{name}", json.dumps(value)))
    assert plan(*NANO, *flags, "--step", "train")["fits"]
    assert "tried" in done.stdout


@pytest.mark.parametrize(
    "kind", ["v4", "v6e", "b200", *(pytest.param(one, marks=pytest.mark.long) for one in ("a100", "h200"))]
)
def test_every_kind_compiles(kind):
    found = plan(*NANO, "--device", kind, "--step", "train")
    assert found["device"] == kind
    assert found["fits"]
    assert found["memory"]["peak"] > found["memory"]["arguments"]
