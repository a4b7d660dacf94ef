"""Configs of a run that differ in a few settings."""

from lmtrain.run.config import RunConfig

BASE = {
    "data": {"train_urls": ["a.jsonl"], "tokenizer": "t"},
    "model": {"hidden_dim": 32, "num_heads": 2},
    "trainer": {"num_train_steps": 100},
}


def build(**changes):
    """A config with `section__name=value` changed."""
    data = {name: dict(section) for name, section in BASE.items()}
    for path, value in changes.items():
        section, name = path.split("__")
        data.setdefault(section, {})[name] = value
    return RunConfig.model_validate(data)
