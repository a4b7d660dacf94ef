"""Candidates of the search, and their form in a config."""

from plan.workers import request

from lmtrain.plan.candidates import alternatives, format_for, parallelisms, to_yaml
from lmtrain.runtime.accelerators import ACCELERATORS


def test_candidates_do_not_change_training_dynamics():
    plain = request()
    assert parallelisms(plain) == [12, 6, 4, 3, 2, 1]
    assert parallelisms(plain, {"trainer.model_axis_size": 4}) == [48, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    fixed = {"trainer": {"train_batch_size", "mp", "seed", "num_train_steps"}, "model": {"seq_len", "hidden_dim"}}
    for name, changes in alternatives(plain, {}):
        config = plain.changed(changes).run_config
        assert changes, name
        for section, names in fixed.items():
            before, after = (getattr(run, section).model_dump(include=names) for run in (plain.run_config, config))
            assert before == after, name
    names = [name for name, _ in alternatives(plain, {})]
    assert "gradient_checkpointing dots" in names
    assert "gradient_checkpointing full" not in names  # the config has it already
    assert "gradient_checkpointing false, scan_layers false" in names  # each alone gains nothing
    assert len(names) == len(set(names))


def test_products_in_8_bits_are_candidates_only_if_allowed_and_where_they_pay():
    def precisions(eight_bit):
        plain = request().changed({"trainer.mp": "p=f32,c=bfloat16"})
        return [changes["trainer.mp"] for _, changes in alternatives(plain, {}, eight_bit) if "trainer.mp" in changes]

    assert precisions(None) == []
    assert precisions("fp8") == ["p=float32,c=bfloat16,q=fp8"]
    kinds = {kind: format_for(ACCELERATORS[kind]) for kind in ("h100", "v5e", "v6e", "v4")}
    assert kinds == {"h100": "fp8", "v5e": "int8", "v6e": None, "v4": None}
    assert format_for(None) is None


def test_long_sequences_are_split_and_one_slice_has_no_replicas():
    plain = request()
    names = {name for name, _ in alternatives(plain, {})}
    assert not [name for name in names if name.startswith(("context", "replica_dcn"))]
    long = plain.changed({"model.seq_len": 16384})
    sizes = [name for name, _ in alternatives(long, {}) if name.startswith("context")]
    assert sizes == ["context_axis_size 2", "context_axis_size 4", "context_axis_size 8"]
    assert parallelisms(long, {"trainer.context_axis_size": 8}) == parallelisms(long, {"trainer.model_axis_size": 8})


def test_the_settings_of_a_search_are_printed_as_yaml():
    changes = {"model.gradient_checkpointing": False, "trainer.tensor_parallel_axes": ["mlp", "heads"]}
    assert to_yaml(changes) == [
        *("model:", "  gradient_checkpointing: false", "trainer:", "  tensor_parallel_axes:", "  - mlp", "  - heads")
    ]
    assert to_yaml({}) == []
