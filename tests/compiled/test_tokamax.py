"""tokamax's kernels, compiled for GPUs. They need JAX 0.11.1, so that tools/check_matrix.sh --gpus runs them."""

import json

import pytest
from compiled.plans import GPU, family, plan, run

from lmtrain.models.attention.kernel import missing_tokamax

pytestmark = pytest.mark.skipif(bool(missing_tokamax()), reason=missing_tokamax())

# Python as if JAX had no Triton backend any more: plans choose the next kernels.
HIDDEN = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "jax.experimental.pallas.triton" else find(name, *more)
"""


@pytest.mark.parametrize("more", [(), ("--model.sliding_window", "1024")], ids=["gpu, causal", "gpu, window"])
def test_attention_is_its_kernel_and_adds_no_products(more):
    plain = ("--data.mask_across_documents", "false", "--model.attn_backend", "tokamax")
    found = plan(*family("llama2", 32), *GPU, *plain, *more)
    assert {kernel["where"].partition(":")[0] for kernel in found["kernels"]} == {"models/attention/tokamax.py"}
    assert {kernel["target"] for kernel in found["kernels"]} == {"mosaic_gpu_v2"}
    assert found["flops"]["redundant"] <= 0.05 * found["flops"]["model"]
    assert found["memory"]["peak"] <= 1.05 * plan(*family("llama2", 32), *GPU)["memory"]["peak"]


def test_without_triton_a_mixture_on_gpus_has_kernels_of_cudnn_and_tokamax(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    places = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run("mixtral_8x7b", "--model.num_layers", "2", *GPU, "--json", **places)
    found = json.loads(done.stdout)
    assert found["failure"] is None, found["failure"]
    kernels = {(kernel["where"].partition(":")[0], kernel["target"]) for kernel in found["kernels"]}
    assert ("models/moe/grouped.py", "mosaic_gpu_v2") in kernels
    assert {where for where, _ in kernels} == {"models/moe/grouped.py", "models/attention/cudnn_packed.py"}
    flops = found["flops"]
    assert flops["compiled"] <= 1.10 * (flops["model"] + flops["recomputed"])
