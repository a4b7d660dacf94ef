"""Candidates of the search, and their form in a config, and whether products in 8 bits pay."""

import pytest
from plan.workers import request

from lmtrain.plan.candidates import alternatives, compare, format_for, lines, parallelisms, to_yaml, with_products
from lmtrain.plan.request import Plan
from lmtrain.run.execution import parse_precision
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


FP8 = "p=float32,c=bfloat16,q=fp8"


def figures(seconds, cycles=None):
    rows = [
        {"where": "models/layers/linear.py:68", "eight_bit": True, "flops": 3e12},
        {"where": "objectives/chunked_sums.py:1", "eight_bit": False, "flops": 1e12},
    ]
    return {"seconds": {"total": seconds}, "cycles": cycles, "products": rows, "flops": {"eight_bit": 3e12}}


def compared(monkeypatch, with_8_bits, without):
    asked = []

    def ask(request, timeout, progress):
        asked.append(request)
        return Plan({}, {"train": without})

    monkeypatch.setattr("lmtrain.plan.candidates.ask", ask)
    found = compare(request().changed({"trainer.mp": FP8}), Plan({}, {"train": with_8_bits}), 60.0)
    assert [(one.config["trainer"]["mp"], one.steps) for one in asked] == [("p=float32,c=bfloat16", ("train",))]
    return found


@pytest.mark.parametrize(
    ("small", "large", "time", "pays"),
    [
        ((0.6,), (1.0,), 0.6, True),
        ((0.95,), (1.0,), 0.95, False),
        ((1.1,), (1.0,), 1.1, False),
        ((0.5, 9.5e8), (1.0, 1e9), 0.95, False),  # a TPU's bound does not know what conversions cost
        ((0.95, 8e8), (1.0, 1e9), 0.8, True),
    ],
)
def test_they_pay_if_they_save_time_by_the_estimate_or_else_by_the_bound(monkeypatch, small, large, time, pays):
    found = compared(monkeypatch, figures(*small), figures(*large))
    assert found["time"] == pytest.approx(time)
    assert (found["format"], found["pays"]) == ("fp8", pays)
    text = "\n".join(lines(figures(*small), found))
    assert f"{time:.2f} x that with products in 16 bits, by the {'estimate' if small[1:] else 'bound'}" in text
    assert ("not advised: remove q=fp8 from trainer.mp" in text) == (not pays)


def test_the_products_of_both_kinds_are_shown_with_their_sources():
    assert list(lines(figures(1.0), None)) == [
        "  8 bits      75 %: 3 TFLOP models/layers/linear.py:68",
        "  16 or more  25 %: 1 TFLOP objectives/chunked_sums.py:1",
    ]


@pytest.mark.parametrize("missing", [{}, {"does_not_fit": "too large"}])
def test_without_figures_of_both_nothing_is_compared(monkeypatch, missing):
    assert compared(monkeypatch, figures(1.0), missing) is None
    assert compare(request(), Plan({}, {"train": figures(1.0)}), 60.0) is None  # no q
    assert compare(request().changed({"trainer.mp": FP8}), Plan({}, {"train": missing}), 60.0) is None


def test_the_setting_of_other_products_is_one_that_can_be_parsed():
    precision = parse_precision(FP8)
    assert with_products(precision, None) == "p=float32,c=bfloat16"
    assert parse_precision(with_products(precision, "int8")).products == "int8"
