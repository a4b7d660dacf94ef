"""Processes of `lmtrain` and of scripts, without the seconds that imports take.

Python's fork server imports JAX and lmtrain once, and each process is forked from it before JAX has a device or a
thread. Everything else is as when a user starts the command: arguments, working folder, environment variables, output,
signals, exit code. Settings that JAX reads from the environment while it is imported are those of the test session,
but for JAX_PLATFORMS; and Orbax, imported, has given the root logger a handler.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# The fork server has this environment, whatever the test that starts it has set.
_SESSION = dict(os.environ)
_CONTEXT = multiprocessing.get_context("forkserver")
_get_context = multiprocessing.get_context
_CONTEXT.set_forkserver_preload(
    """jax flax.linen optax orbax.checkpoint grain tokenizers clu.metrics transformers
    lmtrain.commands.train lmtrain.commands.preprocess lmtrain.models.registry lmtrain.checkpoint.checkpointer
    lmtrain.evaluation.run lmtrain.train.loop.loop lmtrain.train.program.program lmtrain.train.start.exporter
    lmtrain.train.start.initial_state lmtrain.train.start.reporting lmtrain.train.start.train_batches""".split()  # noqa: SIM905
)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


@functools.cache
def _start_server() -> None:
    here = dict(os.environ)
    _set_environment(_SESSION)
    forkserver.ensure_running()
    _set_environment(here)


def _child(
    script: str | None, arguments: Sequence[str], cwd: str, outputs: Sequence[str], environment: Mapping[str, str]
) -> None:
    gc.set_threshold(100_000, 50, 1000)  # as in conftest.py
    os.setsid()
    os.chdir(cwd)
    for stream, output in enumerate(outputs, start=1):
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    _set_environment(environment)
    import jax

    jax.config.update("jax_platforms", environment.get("JAX_PLATFORMS", ""))
    sys.argv = ["lmtrain" if script is None else "-c", *arguments]
    try:
        if script is None:
            from lmtrain.__main__ import main

            main()
        else:
            sys.path.insert(0, "")
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # what the end of an interpreter does, and that of a process of multiprocessing does not
        atexit._run_exitfuncs()
        jax.distributed.shutdown()


class _PoolWorker(_CONTEXT.Process):
    """A process of a pool, which has the environment variables of the process that starts it, like a spawned one."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._environment = dict(os.environ)

    def run(self) -> None:
        _set_environment(self._environment)
        super().run()


class _PoolContext(type(_CONTEXT)):
    Process = _PoolWorker


def fork_workers_of_pools() -> None:
    """From now on, processes that this one would spawn with `multiprocessing` are forked from the fork server.

    Only for workers of builds within a test's own process: forked ones are not in the group of the process that starts
    them. Those of a run in its own process are spawned as a user's are.
    """

    def get_context(method: str | None = None) -> Any:
        if method != "spawn":
            return _get_context(method)
        _start_server()
        return _PoolContext()

    multiprocessing.get_context = get_context


class Forked:
    """A running `lmtrain ARGUMENTS`, or `python -c SCRIPT ARGUMENTS`.

    Its output goes to the file `output`, also that of stderr unless there is a file `errors`.
    It is the leader of a session, has the environment variables of this process and those that are given, and the
    methods of `subprocess.Popen` that tests use.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        cwd: Path,
        output: Path,
        script: str | None = None,
        errors: Path | None = None,
        **environment: str,
    ):
        words = list(map(str, arguments))
        self.args, self.output = words, output
        files = (output, errors or output)
        for file in files:
            file.write_bytes(b"")  # exists from now on, as with subprocess
        everything = {**os.environ, **environment}
        child = (script, words, str(cwd), list(map(str, files)), everything)
        self._process = _CONTEXT.Process(target=_child, args=child)
        _start_server()
        self._process.start()
        self.pid = self._process.pid or 0
        with contextlib.suppress(ProcessLookupError):  # if it has ended
            while os.getpgid(self.pid) != self.pid:  # until os.setsid, which killpg relies on
                time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def end(processes: Iterable[Forked]) -> None:
    """Kill each process that still runs, with all of its group, and wait for it."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def ended(*processes: Forked) -> Iterator[tuple[Forked, ...]]:
    """The processes, of which none is left afterwards."""
    try:
        yield processes
    finally:
        end(processes)


def fake_devices(count: int) -> str:
    """XLA_FLAGS for a process that has `count` devices on its CPU and compiles as fast as the tests do."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def run_script(script: str, *arguments: object, folder: Path, seconds: float = 300, **environment: str) -> str:
    """Run `python -c SCRIPT ARGUMENTS` in `folder` to its end. -> its output"""
    output = folder / "script.output.txt"
    with ended(Forked(arguments, folder, output, script, **environment)) as (process,):
        code = process.wait(seconds)
    assert code == 0, output.read_text()[-6000:]
    return output.read_text()
