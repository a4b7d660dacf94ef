"""`lmtrain eval CONFIG`: the validation loss of a checkpoint, on the config's data."""

import json
import math

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.commands.checkpoint_model import add_checkpoint_flag, find_model
from lmtrain.commands.preprocess import build_validation
from lmtrain.runtime.logging import log, start_console_log


def run(argv: list[str]) -> int:
    parser = Parser("eval", "Validation loss of a checkpoint; the result goes to standard output as JSON.")
    add_checkpoint_flag(parser)
    run = parse_run(parser, argv)
    start_console_log()
    found = find_model(run, run.arguments.checkpoint)
    caches = build_validation(run.config.data)

    from lmtrain.evaluation.evaluate import evaluate
    from lmtrain.train.batching import plan_batching
    from lmtrain.train.setup import open_eval_batches
    from lmtrain.train.step import build_eval_step

    model, params, layout = found.load()
    trainer = run.config.trainer
    batching = plan_batching(trainer, layout.num_batch_shards)
    batches = open_eval_batches(run.config, layout, batching.eval_batch, caches)
    metrics = evaluate(build_eval_step(model, layout, trainer.precision.compute), params, batches)
    loss = metrics["eval/loss"]
    log.info(f"{found.checkpoint.path}: eval loss {loss:.4f} (perplexity {math.exp(loss):.1f})")
    print(json.dumps({"step": found.checkpoint.step, **metrics}))
    return 0
