"""A script: steps_on_meshes.py OUTPUT (suite | more | release). Steps of the test families on 1 and 8 devices.

Writes, for each model and mesh: metrics, and for each parameter the largest difference of its gradient to that of one
device with one microbatch, relative to the largest gradient; and `rounding`, the same
relative to one device without products in 8 bits.
"""

import json
import sys

import jax
import numpy as np
from models import families, quick
from models.conv_mixer import conv_config
from models.two_outputs import two_output_config, two_output_objective

from lmtrain.models.attention.kernel import Choice
from lmtrain.models.gated_delta import devices as gated_delta_devices
from lmtrain.models.registry import build_model
from lmtrain.objectives.config import CrossEntropyConfig
from lmtrain.objectives.cross_entropy import build_objective
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.step.state import state_shardings

SPLIT_OVER = ["mlp", "heads", "vocab"]
TENSOR = PartitioningConfig(model_axis_size=2, tensor_parallel_axes=SPLIT_OVER, axis_resources={"kv_heads": None})
# number of devices, mesh, number of microbatches
MESHES = {"one": (1, PartitioningConfig(), 1), "fsdp": (8, PartitioningConfig(), 2), "fsdp and tensor": (8, TENSOR, 4)}
CAPS = {"attention_logit_cap": 2.0, "final_logit_cap": 3.0, "final_logit_cap_type": "rsqrt"}
MODERN = CAPS | {
    "attention_sinks": True,
    "use_head_bias": True,
    "embedding_norm": True,
    "rope": {"partial_rotary_factor": 0.5},
}
ALL = PartitioningConfig(expert_axis_size=2, context_axis_size=2, model_axis_size=2, tensor_parallel_axes=["mlp"])
EXPERTS = {"one": MESHES["one"], "fsdp and experts": (8, PartitioningConfig(expert_axis_size=4), 2), "all": (8, ALL, 1)}
CONTEXT = PartitioningConfig(context_axis_size=2)
FP8, INT8 = {"products": "fp8"}, {"products": "int8"}
POSITIONS = {f"context {n}": (8, PartitioningConfig(context_axis_size=n), 1) for n in (2, 4)}
POSITIONS = {"one": MESHES["one"]} | POSITIONS
TENSORS = ["one", "fsdp and tensor"]
SPLIT = {name: MESHES[name] for name in ("one", "fsdp and tensor")} | {"fsdp and context": (8, CONTEXT, 1)}
LATENT = families.moe_model(3, **families.LATENT)
AHEAD = build_objective(CrossEntropyConfig(), 0.0, LATENT.config.further_losses)
LATENT_MESHES = {name: MESHES[name] for name in ("one", "fsdp and tensor")}
LATENT_MESHES |= {"all": (8, ALL, 1), "context 4": POSITIONS["context 4"]}
MIXED, DENSE = families.moe_model(2, **families.MIXED), families.dense_model()
QUICK = {"gradient_checkpointing": False}  # compiles sooner; the mixture recomputes
TWO = build_model(two_output_config(num_layers=1, **QUICK), families.VOCAB)
# model, meshes, those that only long tests compile, arguments of the step
MODELS = {
    "window": (families.window_model(4, **MODERN, **QUICK), MESHES, ["fsdp"], {}),
    "auxiliary": (families.auxiliary_model(**QUICK), MESHES, ["fsdp"], {}),
    "mixer": (build_model(conv_config(2, **QUICK), families.VOCAB), MESHES, ["fsdp"], {}),
    "outputs": (TWO, SPLIT, ["fsdp and tensor"], {"objective": two_output_objective()}),
    "hybrid": (families.hybrid_model(**QUICK), MESHES, ["fsdp"], {}),
    "hybrid over positions": (families.hybrid_model(2, **QUICK), POSITIONS, POSITIONS, {}),
    "hybrid with mosaic": (families.hybrid_model(**QUICK), {n: SPLIT[n] for n in TENSORS}, TENSORS, {}),
    "hybrid with triton": (families.hybrid_model(**QUICK), {n: SPLIT[n] for n in TENSORS}, TENSORS, {}),
    "hybrid over positions with triton": (families.hybrid_model(2, **QUICK), POSITIONS, POSITIONS, {}),
    "mixed": (MIXED, EXPERTS, ["fsdp and experts"], {}),
    "biased": (families.moe_model(2, {"biases": True, "gate_limit": 0.5}, **QUICK), EXPERTS, EXPERTS, {}),
    "latent": (LATENT, LATENT_MESHES, ["all", "context 4"], {"objective": AHEAD}),
    "dense": (DENSE, {"one": MESHES["one"]}, MESHES, {}),
    "dense in fp8": (DENSE, SPLIT, SPLIT, FP8),
    "dense in int8": (DENSE, {name: MESHES[name] for name in ("one", "fsdp")}, MESHES, INT8),
    "mixed in fp8": (MIXED, {name: EXPERTS[name] for name in ("one", "all")}, EXPERTS, FP8),
}
RELEASE = (
    "window",
    "auxiliary",
    "mixer",
    "outputs",
    "hybrid with triton",
)  # what these have more is tested before a release


def errors(gradients, expected):
    each = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)), gradients, expected)
    return jax.tree.leaves(each)


found, exact = {}, {}
for name, (model, meshes, long, how) in MODELS.items():
    form = name.rpartition(" with ")[2] if " with " in name else "chunks"  # interpreted
    gated_delta_devices.choose_delta = lambda *more, form=form: Choice(form, "")
    values = quick.random_params(model, {"dense": 0.1, "hybrid": 0.25}.get(name.split()[0], 0.5))
    expected = None
    if sys.argv[2] != "suite" and (sys.argv[2] == "release") != (name in RELEASE):
        continue
    for mesh, (devices, config, microbatches) in meshes.items():
        if mesh in long if sys.argv[2] == "suite" else mesh not in long and mesh != "one":
            continue
        layout = build_layout(config, jax.devices()[:devices])
        step = quick.build_step(model, microbatches=microbatches, layout=layout, **how)
        _, shardings = state_shardings(model, quick.KEEPER, layout, "float32")
        state, metrics, _ = step(jax.device_put(quick.new_state(values), shardings), families.BATCH)
        gradients = jax.device_get(state.opt_state[0].trace)
        expected = expected or gradients
        unrounded = exact.setdefault(name.partition(" in ")[0], gradients)
        metrics |= {f"{key}/layers": value for key, value in metrics.pop("by_layer", {}).items()}
        found[f"{name}, {mesh}"] = {
            "metrics": {key: np.asarray(value, np.float64).tolist() for key, value in metrics.items()},
            "errors": errors(gradients, expected),
            "rounding": errors(gradients, unrounded),
        }
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
