"""The number of replicas over slices that `replica_dcn_axis_size: auto` gives on this machine, for `config show`."""

from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.run.run import ResolvedSettings, Run, resolve
from lmtrain.runtime.logging import nothing_logged


def resolve_replicas(run: Run) -> Run:
    """The run with that number. Raises `UserError` if this machine cannot run it."""
    from lmtrain.train.program.program import build_program

    with nothing_logged():
        tokenizer = open_tokenizer(run.config.data.tokenizer, run.config.data.vocab_size)
        replicas = build_program(run.config, tokenizer.vocab_size).replicas
    number = {"trainer": {"replica_dcn_axis_size": replicas.number}}
    return resolve(run, ResolvedSettings(f"auto: {replicas.reason}", number))
