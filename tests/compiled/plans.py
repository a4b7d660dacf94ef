"""`lmtrain plan --json` for accelerators that are not here, as a user calls it. Answers are kept for the session."""

import functools
import json
import os
import subprocess
import sys
import tempfile

_KEPT = tempfile.mkdtemp(prefix="lmtrain-plans-")
_SECONDS = 900

# Four layers where the stack is scanned: a loop's body is compiled once, whatever the number of layers.
FOUR = ("--model.num_layers", "4")
NO_HF = ("--initialize_from_hf", "false", "--use_hf_model_config", "false")
MPT_7B = (*NO_HF, "--model.hidden_dim", "4096", "--model.num_heads", "32", *FOUR)


def run(*arguments: str, folder: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command; without flags for XLA, which the tests' own environment has for the CPU."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "lmtrain", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=folder or _KEPT,
        env={**clean, "XDG_CACHE_HOME": _KEPT, **environment},
    )


@functools.cache
def plan(*arguments: str) -> dict:
    """The figures of the training step, those of evaluation below `eval`."""
    done = run(*arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["failure"] is None, found["failure"]
    return found
