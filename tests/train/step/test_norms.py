"""Norms of gradients, parameters and updates: equal to numpy, and only in the steps that log them."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import build_program
from lmtrain.train.step.norms import WATCH

VOCAB, LAYERS = 24, 3
MODEL = {"type": "gpt2", "hidden_dim": 16, "num_heads": 2, "num_layers": LAYERS, "seq_len": 8, "mlp_scale": 2}
SGD = {"learning_rate": 0.5, "warmup": 0, "weight_decay": 0.0, "max_grad_norm": None}
ALL = ["grads", "params", "updates"]
PREFIXES = {"grads": "grad", "params": "params", "updates": "updates"}


def program(watch: dict, **model):
    trainer = {"train_batch_size": 4, "num_train_steps": 10, "watch": watch}
    config = RunConfig(model=MODEL | {"gradient_checkpointing": False} | model, trainer=trainer, optimizer=SGD)
    return build_program(config, VOCAB)


def batch(step: int, rows: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (rows, 8)).astype(np.int32)
    return {"tokens": tokens, "loss_mask": np.arange(8) < rng.integers(3, 8, (rows, 1))}


def flat(tree) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def norm(*leaves: np.ndarray) -> float:
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in leaves)))


def names_and_norms(prefix: str, leaves: dict[str, np.ndarray], split: bool = True) -> dict[str, float]:
    """Expected metrics of a tree, including each parameter; `blocks` are stacked over layers."""
    stacked = {name: leaf for name, leaf in leaves.items() if name.startswith("blocks/")}
    assert len(stacked) == 12
    assert {leaf.shape[0] for leaf in stacked.values()} == {LAYERS}
    expected = {"total": norm(*leaves.values())}
    expected |= {name: norm(leaf) for name, leaf in leaves.items() if not split or name not in stacked}
    if split:
        for layer in range(LAYERS):
            expected[f"blocks/{layer}"] = norm(*(leaf[layer] for leaf in stacked.values()))
            for name, leaf in stacked.items():
                expected[f"blocks/{layer}/{name.removeprefix('blocks/')}"] = norm(leaf[layer])
    else:
        expected["blocks"] = norm(*stacked.values())
    return {f"{prefix}/norm/{name}": value for name, value in expected.items()}


def gradients(planned, state, data) -> dict[str, np.ndarray]:
    """Gradients of the mean loss over all targets, by JAX from the model's logits."""

    def mean_loss(params):
        logits = planned.model.apply({"params": params}, data["tokens"])[:, :-1]
        losses = -jax.numpy.take_along_axis(jax.nn.log_softmax(logits), data["tokens"][:, 1:, None], -1)[..., 0]
        kept = data["loss_mask"][:, :-1]
        return (losses * kept).sum() / kept.sum()

    return flat(jax.jit(jax.grad(mean_loss))(state.params))


@pytest.mark.parametrize(
    ("scan", "split"),
    [(True, True), *(pytest.param(*case, marks=pytest.mark.long) for case in ((False, True), (True, False)))],
)
def test_norms_in_total_by_layer_and_by_parameter_are_those_of_numpy(scan, split):
    watch = {"watch_targets": ALL, "include_per_parameter_norms": True, "split_scan_layers": split, "interval": 1}
    planned = program(watch, scan_layers=scan)
    state = planned.init()
    before = flat(state.params)
    of_gradients = gradients(planned, state, batch(1))
    state, metrics, _ = planned.train_step(state, batch(1))
    after = flat(state.params)
    found = planned.watch.by_name(jax.device_get(metrics[WATCH]))
    trees = {"grad": of_gradients, "params": after, "updates": {name: after[name] - before[name] for name in after}}
    expected = {}
    for prefix, leaves in trees.items():
        expected |= names_and_norms(prefix, leaves, split)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    assert found["grad/norm/total"] == pytest.approx(float(metrics["train/gradient_norm"]), rel=1e-6)
    assert found["updates/norm/total"] > 0.01
    if split:
        assert len({found[f"{prefix}/norm/blocks/{layer}"] for prefix in trees for layer in range(LAYERS)}) == 9


def names(planned) -> set[str]:
    """Metric names of the norms of a step, without compiling it."""
    shapes = jax.eval_shape(planned.train_step.jitted, *planned.example())[1].get(WATCH, {})
    return set(planned.watch.by_name(jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes)))


def test_norms_of_parameters_and_updates_are_optional():
    of_one = ("total", "blocks/0", "blocks/1", "blocks/2")
    assert names(program({})) == {f"{prefix}/norm/{name}" for prefix in ("grad", "params") for name in of_one}


@pytest.mark.parametrize("targets", [[], ["params"], ["updates", "grads"]])
def test_only_the_named_targets_are_watched(targets):
    found = names(program({"watch_targets": targets}))
    assert {name.partition("/")[0] for name in found} == {PREFIXES[target] for target in targets}


def test_norms_are_computed_and_logged_only_in_multiples_of_the_interval():
    planned = program({"interval": 3}, num_layers=1)
    assert [planned.watch.shows(step) for step in range(1, 10)] == [step % 3 == 0 for step in range(1, 10)]
    state, computed = planned.init(), []
    for step in range(1, 8):
        state, metrics, _ = planned.train_step(state, batch(step))
        computed += [step] * (float(metrics[WATCH]["params"]["total"]) > 0)
    assert computed == [3, 6]


def test_without_targets_the_compiled_step_computes_no_norms():
    """There is not even a condition that is never true."""

    def text(watch):
        planned = program(watch)
        return planned.train_step.lower(*planned.example()).as_text()

    off, on = text({"watch_targets": []}), text({})
    conditions = ("stablehlo.case", "stablehlo.if")
    assert [sum(off.count(word) for word in conditions), sum(on.count(word) for word in conditions)] == [0, 1]
    assert len(off) < len(on)
    planned = program({"watch_targets": []})
    assert WATCH not in jax.eval_shape(planned.train_step.jitted, *planned.example())[1]
    assert not any(planned.watch.shows(step) for step in range(100))


@pytest.mark.long
def test_norms_of_bfloat16_parameters_are_summed_in_float32():
    """The total is also summed in float32, so it matches its parts."""
    planned = build_program(
        RunConfig(
            model=MODEL,
            trainer={
                "train_batch_size": 4,
                "mp": "bf16",
                "watch": {"interval": 1, "include_per_parameter_norms": True},
            },
            optimizer=SGD,
        ),
        VOCAB,
    )
    state, metrics, _ = planned.train_step(planned.init(), batch(1))
    found = planned.watch.by_name(jax.device_get(metrics[WATCH]))
    expected = names_and_norms("params", flat(jax.tree.map(lambda leaf: leaf.astype("float32"), state.params)))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def run(planned, steps: int) -> list[dict[str, float]]:
    """The metrics of each step as they are logged."""
    state, found = planned.init(), []
    for step in range(1, steps + 1):
        state, metrics, _ = planned.train_step(state, batch(step))
        norms = metrics.pop(WATCH, {})
        logged = {name: float(value) for name, value in metrics.items()}
        if planned.watch.shows(step):
            logged |= planned.watch.by_name(jax.device_get(norms))
        found.append(logged)
    return found


@pytest.mark.long
def test_watching_changes_losses_by_no_more_than_rounding():
    """The two programs are compiled separately, and the compiler may order sums differently."""
    plain = run(program({"watch_targets": []}, num_layers=1), 5)
    every = {"watch_targets": ALL, "include_per_parameter_norms": True, "interval": 2}
    watched = run(program(every, num_layers=1), 5)
    for one, other in zip(plain, watched, strict=True):
        assert {name: other[name] for name in one} == pytest.approx(one, rel=1e-4)
    assert len({metrics["train/loss"] for metrics in plain}) == 5


MESHES = """
import json, sys
import jax
sys.path.insert(0, sys.argv[1])
from test_norms import ALL, MODEL, SGD, VOCAB, batch
from lmtrain.run.config import RunConfig
from lmtrain.sharding.placement import LocalPart
from lmtrain.train.program.program import build_program
from lmtrain.train.step.norms import WATCH

found = {}
every = jax.devices
for name, devices, trainer in json.loads(sys.argv[2]):
    watch = {"watch_targets": ALL, "include_per_parameter_norms": True, "interval": 1}
    config = RunConfig(model=MODEL, trainer={"train_batch_size": 8, "watch": watch} | trainer, optimizer=SGD)
    jax.devices = lambda *_: every()[:devices]
    planned = build_program(config, VOCAB)
    jax.devices = every
    one = batch(1, 8)
    placed = LocalPart.of(planned.layout.batch, *one["tokens"].shape).place(one)
    state, metrics, _ = planned.train_step(planned.init(), placed)
    found[name] = planned.watch.by_name(jax.device_get(metrics[WATCH]))
    split = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)}
    found[name]["devices"] = max(split)
print(json.dumps(found))
"""


@pytest.mark.multi_device
@pytest.mark.long
def test_norms_on_a_mesh_equal_those_on_one_device():
    tensor = {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]}
    cases = [["one", 1, {}], ["fsdp", 4, {"per_device_parallelism": 1}], ["tensor", 4, tensor]]
    flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", MESHES, os.path.dirname(__file__), json.dumps(cases)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: norms.pop("devices") for name, norms in found.items()} == {"one": 1, "fsdp": 4, "tensor": 4}
    one = found.pop("one")
    assert len(one) == 3 * (1 + LAYERS * 13 + 4)
    for name, norms in found.items():
        assert norms == pytest.approx(one, rel=1e-4, abs=1e-6), name


def test_norms_of_layers_that_have_other_parameters_are_under_the_numbers_of_these_layers():
    """Layers 0 and 2 have a mixture of experts, layer 1 has one MLP."""
    sizes = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 2, "num_layers": 3, "seq_len": 8}
    mixed = {"layer_pattern": ["full", {"attention": "full", "mlp": "dense"}], "moe": {"num_experts": 4}}
    watch = {"watch_targets": ["params"], "include_per_parameter_norms": True, "interval": 1}
    trainer = {"train_batch_size": 4, "watch": watch}
    made = build_program(RunConfig(model={"type": "llama", **sizes, **mixed}, trainer=trainer, optimizer=SGD), VOCAB)
    state, metrics, _ = made.train_step(made.init(), batch(0))
    found = made.watch.by_name(jax.device_get(metrics[WATCH]))
    leaves = {name: leaf for name, leaf in flat(state.params).items() if name.startswith("blocks/")}
    of_layer = {layer: [] for layer in range(3)}
    for name, leaf in leaves.items():
        numbers = {3: (0, 1, 2), 2: (0, 2), 1: (1,)}[len(leaf)]
        for layer, part in zip(numbers, leaf, strict=True):
            of_layer[layer].append(part)
            own = f"params/norm/blocks/{layer}/{name.removeprefix('blocks/')}"
            assert found[own] == pytest.approx(norm(part), rel=1e-5), own
    for layer, parts in of_layer.items():
        assert found[f"params/norm/blocks/{layer}"] == pytest.approx(norm(*parts), rel=1e-5)
    assert sum(name.startswith("params/norm/blocks/1/mlp") for name in found) == 3
