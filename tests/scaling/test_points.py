"""The runs of a ladder: lengths, branches, learning rates, growing settings, clear errors."""

import pytest
from scaling.made_ladder import BASE, LADDER, dirs, write_ladder

from lmtrain.commands.scaling import read_ladder
from lmtrain.models.params import count_parameters
from lmtrain.models.registry import build_model
from lmtrain.optim.config import build_cycles
from lmtrain.runtime.errors import UserError
from lmtrain.scaling.points import best_rates, points, trials


@pytest.fixture
def make(tmp_path):
    """A function: the ladder with these settings."""
    return lambda **changes: read_ladder(write_ladder(tmp_path, **changes), None)


def test_parameters_are_matrices_and_the_head(make):
    ladder = make()
    for size in ladder.sizes:
        model = build_model(size.model, ladder.vocab_size)
        width, table = size.model.hidden_dim, size.model.padded(ladder.vocab_size)
        norms = (2 * size.model.num_layers + 1) * width
        padding = (table - ladder.vocab_size) * width  # the padded rows of the head
        assert size.parameters == count_parameters(model) - table * width - norms - padding


def test_lengths_are_ratios_of_tokens_in_whole_batches(make):
    ladder = make()
    runs = points(ladder, [1e-2] * 4)
    assert len(runs) == len({run.id for run in runs}) == 12
    for run in runs:
        assert run.tokens == run.steps * 4 * 32
        assert run.tokens == pytest.approx(run.ratio * run.parameters, abs=4 * 32)


def test_shorter_runs_branch_off_where_their_decay_starts(make, tmp_path):
    ladder = make()
    longest, *others = [run for run in points(ladder, [1e-2] * 4) if run.size == 2]
    for run in others:
        config, of_longest = (ladder.load(each.settings, each.id) for each in (run, longest))
        start, decay = run.start, config.optimizer.decay
        assert start + decay == run.steps
        assert config.trainer.initialize_from == str(tmp_path / "checkpoints" / longest.id / f"step-{start}")
        (kept,) = [entry for entry in of_longest.trainer.checkpointer.keep if entry.every == start]
        assert kept.until == start
        (cycle,) = build_cycles(config.optimizer, run.steps)
        (long,) = build_cycles(of_longest.optimizer, longest.steps)
        assert (cycle.warmup, cycle.end - cycle.decay) == (long.warmup, start)
        assert run.flops == pytest.approx(run.flops_per_token * decay * 4 * 32)


def test_cosine_trains_every_length_from_the_start(make):
    ladder = make(schedule="cosine")
    for run in points(ladder, [1e-2] * 4):
        config = ladder.load(run.settings, run.id)
        assert (run.parent, config.trainer.initialize_from, config.optimizer.decay) == (None, None, None)
        assert config.optimizer.lr_schedule == "cosine"


def test_larger_sizes_transfer_from_the_smallest(make):
    runs = points(ladder := make(), [1e-2] * 4)
    bases = [ladder.load(run.settings, run.id).transfer for run in runs]
    assert bases[0] is None
    assert bases[-1].base == {"hidden_dim": 16, "intermediate_dim": 44, "num_heads": 1, "num_layers": 1}
    assert all("transfer.base" not in run.settings for run in points(make(transfer=False), [1e-2] * 4))


def test_the_config_may_have_the_transfer_of_the_large_run(make):
    base = BASE | {"transfer": {"base": {"hidden_dim": 16, "intermediate_dim": 44, "num_heads": 1, "num_layers": 1}}}
    runs = points(ladder := make(base=base), [1e-2] * 4)
    bases = [ladder.load(run.settings, run.id).transfer for run in runs]
    assert bases[0] is None
    assert bases[-1].base == base["transfer"]["base"]


def test_sizes_are_sorted_by_parameters(make):
    ladder = make(sizes=list(reversed(LADDER["sizes"])))
    assert [size.model.hidden_dim for size in ladder.sizes] == [16, 32, 48, 64]


def test_learning_rates_are_tried_with_the_longest_run_of_the_smallest_size(make):
    ladder = make(learning_rates=[0.01, 0.02, 0.04])
    tried = trials(ladder)
    assert [(run.size, run.ratio, run.rate) for run in tried] == [(0, 20, 0.01), (0, 20, 0.02), (0, 20, 0.04)]
    assert best_rates(ladder, {tried[0].id: 3.0}) is None
    losses = {run.id: loss for run, loss in zip(tried, (3.1, 2.9, 3.0), strict=True)}
    assert best_rates(ladder, losses) == [0.02] * 4
    assert tried[1].id in {run.id for run in points(ladder, [0.02] * 4)}


def test_without_transfer_each_size_has_its_own_learning_rate(make):
    ladder = make(learning_rates=[0.01, 0.02], transfer=False)
    losses = {run.id: abs(run.rate - (0.01 if run.size > 1 else 0.02)) for run in trials(ladder)}
    assert best_rates(ladder, losses) == [0.02, 0.02, 0.01, 0.01]


def test_a_model_without_transfer_needs_a_ladder_without(tmp_path):
    linear = {"layer_pattern": ["linear"], "linear_attention": {"num_key_heads": 2, "num_value_heads": 2}}
    base = BASE | {"model": BASE["model"] | linear, "trainer": BASE["trainer"] | dirs(tmp_path)}
    with pytest.raises(UserError, match=r"ladder\.yaml: transfer: .*linear.*transfer: false"):
        read_ladder(write_ladder(tmp_path, base), None)
    read_ladder(write_ladder(tmp_path, base, transfer=False), None)


def test_settings_grow_with_tokens(make):
    ladder = make(schedule="cosine", growth={"batch_size": 0.5, "learning_rate": 0.25, "weight_decay": -0.5})
    runs = points(ladder, [1e-2] * 4)
    reference = ladder.sizes[0].parameters * 20
    for run in runs:
        config = ladder.load(run.settings, run.id)
        ratio = run.parameters * run.ratio / reference
        batch = config.trainer.train_batch_size
        assert batch % 4 == 0
        assert batch == pytest.approx(max(4, 4 * ratio**0.5), abs=2)
        assert config.optimizer.learning_rate == pytest.approx(1e-2 * (batch / 4) ** 0.5, rel=1e-3)
        assert config.optimizer.weight_decay == pytest.approx(0.1 * ratio**-0.5, rel=1e-3)


def test_runs_of_wsd_have_the_settings_of_their_longest(make):
    runs = points(ladder := make(growth={"batch_size": 0.5}), [1e-2] * 4)
    for size in range(4):
        batches = {ladder.load(r.settings, r.id).trainer.train_batch_size for r in runs if r.size == size}
        assert len(batches) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_parameter": [20]}, "at least 2"),
        ({"tokens_per_parameter": [20, 10]}, "expected ascending numbers"),
        ({"tokens_per_parameter": [5e6, 1e7]}, "less than or equal to 100000"),
        ({"seeds": [1, 1]}, "a seed occurs twice"),
        ({"overrides": {"trainer.seed": 1}}, "trainer.seed: the ladder sets it"),
        ({"overrides": {"transfer.base": {}}}, "transfer.base: the ladder sets it"),
        ({"transfer": False, "rates_at": "smallest"}, "say nothing about another"),
        ({"growth": {"learning_rate": 0.2}}, "set growth.batch_size"),
        ({"overrides": {"optimizer": {"learning_rate": 1}}}, "optimizer: write its settings by dotted name"),
        ({"overrides": {"optimizer.cycles": 2}}, "optimizer.cycles: a ladder and its law are for one cycle"),
        (
            {"overrides": {"model.num_layer": 2}},
            r"ladder.yaml: config with overrides: (.|\n)*did you mean model.num_layers",
        ),
        ({"learning_rates": [1e-3, 1.0000001e-3]}, "two numbers are the same in six digits"),
        ({"sizes": [{"hidden_dim": 64, "seq_len": 16}]}, "seq_len is no size"),
        ({"schedul": "wsd"}, "did you mean .*schedule"),
        ({"config": "nothing"}, "ladder.yaml: config: nothing: no such config"),
        ({"sizes": [{"hidden_dim": 30}]}, r"sizes\[0\]: (.|\n)*does not divide hidden_dim"),
        ({"sizes": [{"hidden_dim": 64}, {"intermediate_dim": 64}]}, "two are 64x4"),
        ({"overrides": {"trainer.steps_per_eval": None}}, "no evaluation"),
        (
            {"overrides": {"trainer.train_batch_size": [{"start": 0, "value": 4}, {"start": 9, "value": 8}]}},
            "one batch",
        ),
        ({"overrides": {"epoch": 1}}, "epoch: the ladder sets it"),
        ({"overrides": {"trainer.checkpointer.append_run_id_to_base_path": False}}, "append_run_id_to_base_path"),
    ],
)
def test_a_bad_ladder_is_an_error(make, changes, message):
    with pytest.raises(UserError, match=message):
        make(**changes)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
@pytest.mark.parametrize("lengths", [[0.001, 0.002], [0.01, 0.3], [5.1, 5.1001]])
def test_runs_of_a_few_steps_or_of_the_same_length_are_an_error(make, schedule, lengths):
    with pytest.raises(UserError, match=r"ladder-16x1-\S+ has .* steps?: .*increase tokens_per_parameter"):
        points(make(tokens_per_parameter=lengths, schedule=schedule), [1e-2] * 4)


def test_too_few_steps_are_an_error(make, tmp_path):
    with pytest.raises(UserError, match=r"of warmup and .* of decay do not fit"):
        points(make(overrides={"optimizer.warmup": 0.5}), [1e-2] * 4)
    base = BASE | {"trainer": BASE["trainer"] | dirs(tmp_path), "initialize_from_hf": "gpt2"}
    with pytest.raises(UserError, match="initialize_from_hf: a ladder and its law are for runs from new parameters"):
        make(base=base)
