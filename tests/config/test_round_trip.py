"""Round trip: any valid config, dumped as YAML and loaded again, is equal."""

import string

import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmtrain.config.describe import show
from lmtrain.config.load import load_config
from lmtrain.config.tree import ConfigTree
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import run_id

# without control characters, which YAML cannot print
TEXT = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=20)
NAME = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=20)
STEPS = st.integers(1, 1000)
LENGTH = st.one_of(st.integers(0, 50), st.floats(0, 0.4))
POSITIVE = st.floats(1e-12, 1e3)
DURATION = st.one_of(st.none(), st.builds("{}{}".format, st.integers(1, 99), st.sampled_from("smhd")))


def section(**optional):
    return st.fixed_dictionaries({}, optional=optional)


DATA = section(
    train_urls=st.lists(TEXT, max_size=3),
    tokenizer=TEXT,
    shuffle=st.booleans(),
    num_preprocess_workers=st.none() | STEPS,
)
SIZES = st.sampled_from([{}, {"hidden_dim": 64, "num_heads": 4}, {"hidden_dim": 768, "num_heads": 16}])
MODEL = st.builds(
    lambda sizes, rest: sizes | rest,
    SIZES,
    section(type=st.sampled_from(["gpt2", "llama", "mpt", "backpack"]), num_layers=STEPS, layer_norm_epsilon=POSITIVE),
)
WANDB = section(type=st.just("wandb"), project=st.none() | TEXT, tags=st.lists(TEXT, max_size=3), id=NAME)
TRACKER = st.one_of(WANDB, st.just({"type": "json"}), st.builds(lambda d: {"type": "tensorboard", "logdir": d}, TEXT))
KEEP = st.lists(STEPS, unique=True, max_size=3).map(
    lambda ends: [{"every": 5, "until": end} for end in sorted(ends)] + [{"every": 7}]
)
TRAINER = section(
    seed=st.integers(0, 2**32 - 1),
    num_train_steps=st.integers(100, 10_000),
    train_batch_size=STEPS,
    tracker=TRACKER | st.lists(TRACKER, max_size=3),
    fsdp_axis=st.sampled_from([None, "embed", ["embed", "vocab"], []]),
    axis_resources=st.dictionaries(
        st.sampled_from(["batch", "mlp"]), st.sampled_from(["data", ["data", "model"], None])
    ),
    checkpointer=section(base_path=TEXT, save_interval=DURATION, keep=KEEP),
)
OPTIMIZER = section(
    type=st.sampled_from(["adam", "sophia-h", "sophia-g"]),
    learning_rate=POSITIVE,
    min_lr_ratio=st.floats(0, 1),
    warmup=LENGTH,
    decay=st.none() | LENGTH,
    cycles=st.none() | st.integers(1, 3),
)
CONFIG = section(
    data=DATA,
    model=MODEL,
    trainer=TRAINER,
    optimizer=OPTIMIZER,
    initialize_from_hf=st.booleans() | TEXT,
    data_seed=st.none() | st.integers(0, 9),
)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=CONFIG)
def test_shown_and_dumped_configs_load_as_the_same_config(data, tmp_path_factory):
    try:
        config = RunConfig.model_validate(data)
    except ValidationError:
        assume(False)
    assume("://" not in str(data))  # secrets in URLs are redacted
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    for text in (show(resolved(config), ConfigTree(data)), yaml.safe_dump(resolved(config), allow_unicode=True)):
        path.write_text(text, encoding="utf-8")
        again = load_config(RunConfig, str(path))
        assert again.config == config
        assert run_id(again.config, "x", {}) == run_id(config, "x", {})
