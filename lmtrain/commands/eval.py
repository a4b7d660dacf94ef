"""`lmtrain eval CONFIG`: the validation loss of a checkpoint, on the config's data."""

import json
import math

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.commands.caches import plan_caches, start_build, wait
from lmtrain.commands.checkpoint_model import add_checkpoint_flag, find_model
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.processes import ALONE
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest


def run(argv: list[str]) -> int:
    parser = Parser("eval", "Validation loss of a checkpoint; the result goes to standard output as JSON.")
    add_checkpoint_flag(parser)
    run = parse_run(parser, argv)
    start_console_log()
    found = find_model(run, run.arguments.checkpoint)
    plans = plan_caches(run.config.data, train=False)
    with StopRequest("discarding unfinished shards") as stop:
        build = start_build(run.config, plans, ALONE)
        try:
            wait(build, stop)
        except StoppedError:
            return STOPPED_BY_SIGNAL
        finally:
            build.stop()

    from lmtrain.evaluation.evaluate import evaluate
    from lmtrain.train.batching import plan_batching
    from lmtrain.train.setup import open_eval_batches
    from lmtrain.train.step import build_eval_step

    model, params, layout = found.load()
    trainer = run.config.trainer
    batching = plan_batching(trainer, layout.num_batch_shards)
    batches = open_eval_batches(run.config, layout, batching.eval_batch, plans.caches.validation)
    metrics = evaluate(build_eval_step(model, layout, trainer.precision.compute), params, batches)
    loss = metrics["eval/loss"]
    log.info(f"{found.checkpoint.path}: eval loss {loss:.4f} (perplexity {math.exp(loss):.1f})")
    print(json.dumps({"step": found.checkpoint.step, **metrics}))
    return 0
