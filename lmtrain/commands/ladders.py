"""Ladders for commands: their files, their laws, and the training data that they have."""

import os
from typing import TYPE_CHECKING

from lmtrain.config.errors import UserError
from lmtrain.config.load import find_config, load_config
from lmtrain.config.yaml_loader import load_file
from lmtrain.plan.known_models import find_vocab_size
from lmtrain.run.config import RunConfig
from lmtrain.scaling.arguments import as_overrides
from lmtrain.scaling.config import LadderConfig
from lmtrain.scaling.ladder import Ladder, build_ladder

if TYPE_CHECKING:
    from lmtrain.scaling.fitted import FittedLadder


def read_ladder(path: str, vocab_size: int | None) -> Ladder:
    """The ladder of a file, with the config that it names, relative to the file or as on the command line."""
    try:
        loaded = load_config(LadderConfig, path)
    except UserError:
        written = load_file(find_config(path)).data
        if "sizes" not in written and {"data", "model", "trainer"} & set(written):
            raise UserError(f"{path} is the config of a run, not a ladder, which has config and sizes") from None
        raise
    config = loaded.config.config
    here = os.path.join(os.path.dirname(loaded.path), config)
    near = [here + ending for ending in ("", ".yaml", ".yml") if os.path.isfile(here + ending)]
    try:
        found = near[0] if near else find_config(config)
    except UserError as error:
        raise UserError(f"{loaded.path}: config: {error}") from None
    try:
        base = load_config(RunConfig, found, as_overrides(loaded.config.overrides))
    except UserError as error:
        raise UserError(f"{loaded.path}: config with overrides: {error}") from None
    return build_ladder(loaded, base, find_vocab_size(base.config.data, vocab_size)[0])


def read_fit(ladder: Ladder) -> "FittedLadder":
    """The law of the runs of a ladder that are done."""
    from lmtrain.scaling.fitted import fit_ladder
    from lmtrain.scaling.results import read_results

    return fit_ladder(ladder, read_results(ladder), train_tokens(ladder.run))


def train_tokens(config: RunConfig) -> float | None:
    """Tokens that a run can read before its data repeats; None if the cache is not here or not complete.

    Of a mixture, a source of weight w repeats after its tokens / w.
    """
    from lmtrain.preprocess.prepare import find_caches

    try:
        caches = find_caches(config.data, validation=False).train
    except (UserError, OSError):  # the text may be on another machine
        return None
    if not all(cache.complete for cache in caches.values()):
        return None
    if config.data.configs is None:
        return float(sum(cache.shards.tokens for cache in caches.values()))
    changes = [weights for _, weights in config.data.weight_changes(list(caches))]
    shares = {name: max(weights.get(name, 0.0) / sum(weights.values()) for weights in changes) for name in caches}
    return min((cache.shards.tokens / shares[name] for name, cache in caches.items() if shares[name]), default=None)
