"""Number of steps of a run: from its config, or from its data if that ends earlier."""

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.data.caches import Caches, check_batch, choose_steps
from lmtrain.run.config import RunConfig, data_seed
from lmtrain.run.run import ResolvedSettings
from lmtrain.runtime.logging import log


def length_of_data(config: RunConfig, caches: Caches) -> ResolvedSettings | None:
    """The number of steps that the data allows, if that ends the run earlier; schedules follow it.

    Raises `UserError` for data smaller than one batch.
    """
    trainer = config.trainer
    check_batch(config.data, caches, config.model.seq_len, trainer.batch_sizes)
    steps = choose_steps(
        config.data,
        caches,
        config.model.seq_len,
        trainer.batch_sizes,
        trainer.num_train_steps,
        config.epoch,
        data_seed(config),
    )
    if steps == trainer.num_train_steps:
        return None
    if steps < 1:
        raise UserError("the data is less than one batch; lower trainer.train_batch_size or model.seq_len")
    why = f"epoch {config.epoch}" if config.epoch else "data.stop_strategy first_exhausted"
    log.info(f"{why}: the data ends the run after {counted(steps, 'step')}")
    return ResolvedSettings(f"{why} ({counted(steps, 'step')})", {"trainer": {"num_train_steps": steps}})
