"""Replacements of the planner's workers: forked processes, and a compiler that computes nothing."""

import contextlib
import sys
from pathlib import Path

from forked import Forked

from lmtrain.plan.candidates import parallelisms
from lmtrain.plan.request import Plan, Request, Target
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import find_topology

MODEL = {"hidden_dim": 64, "num_heads": 4, "num_layers": 2, "seq_len": 64}


@contextlib.contextmanager
def forked_worker(command, log, variables):
    """Replaces the start of a worker, without the seconds of its imports."""
    assert command[:3] == [sys.executable, "-m", "lmtrain.plan.worker"]
    script = "import sys; from lmtrain.plan.worker import main; sys.exit(main(sys.argv[1:]))"
    process = Forked(command[3:], Path.cwd(), Path(log.name), script, **variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def request(**trainer) -> Request:
    """Of eight H100s and batches of 96 sequences."""
    config = RunConfig(model={"type": "llama", **MODEL}, trainer={"train_batch_size": 96, **trainer})
    return Request.of(config, 500, Target.of(find_topology("h100", devices=8)), ("train",), True)


def local_request(compile_it: bool, **trainer) -> Request:
    """Of one fake CPU device."""
    return Request.of(RunConfig(model=MODEL, trainer=trainer), 100, Target(shape=(1,)), ("train",), compile_it)


class FakeCompiler:
    """Replaces `ask`. `cost(size, gradient_checkpointing)` gives a step's seconds, its peak memory, and the state's."""

    def __init__(self, cost):
        self._cost = cost
        self.compiled = 0

    def __call__(self, asked: Request, timeout, progress=lambda text: None) -> Plan:
        config = asked.run_config
        size = config.trainer.per_device_parallelism
        size = parallelisms(asked)[0] if size == -1 else size
        seconds, peak, state = self._cost(size, config.model.gradient_checkpointing)
        program = {"state": {"params": state}, "device": "h100"}
        if not asked.compile:
            return Plan(program)
        self.compiled += 1
        return Plan(program, {"train": {"step": "train", "memory": {"peak": peak}, "seconds": {"total": seconds}}})
