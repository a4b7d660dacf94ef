"""Each process reads its share of a Hugging Face model, from disk or a URL, and the model is the same."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flax.core.meta import unbox
from hf_tensors import to_hf
from multihost.processes import run_processes
from safetensors.numpy import save_file
from web import QuietFiles, serving

from lmtrain.models.params import abstract_params, flatten, unflatten
from lmtrain.models.registry import build_model, hf_family
from lmtrain.run.config import RunConfig

SCRIPT = Path(__file__).with_name("read_hf_params.py")
VOCAB = 500  # not a multiple of the number of devices
MODEL = {"type": "llama", "hidden_dim": 256, "num_heads": 4, "num_layers": 2, "seq_len": 32,
         "intermediate_dim": 600, "pad_vocab_to_multiple_of": 8}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with one file of weights."""
    folder = tmp_path_factory.mktemp("model")
    config = RunConfig.model_validate({"model": MODEL}).model
    rng = np.random.default_rng(0)
    abstract = flatten(unbox(abstract_params(build_model(config, VOCAB))))
    tree = unflatten({path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in abstract.items()})
    tensors = to_hf(hf_family("llama").table(config), tree, config.num_layers, VOCAB)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Ranges(QuietFiles):
    """Answers range requests, as object stores do."""

    def do_GET(self):  # noqa: N802  # a name of http.server
        path = Path(self.translate_path(self.path))
        requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not path.is_file() or requested is None:
            super().do_GET()
            return
        content = path.read_bytes()[int(requested[1]) : int(requested[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Range", f"bytes {requested[1]}-{requested[2]}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def url(source):
    with serving(partial(Ranges, directory=source)) as address:
        yield f"http://{address}"


@pytest.mark.parametrize(
    ("place", "count"),
    [("disk", 4), pytest.param("url", 4, marks=pytest.mark.long), pytest.param("disk", 2, marks=pytest.mark.long)],
)
def test_each_process_reads_its_share_and_all_hold_the_same_model(source, url, place, count, tmp_path):
    ref = str(source) if place == "disk" else url
    size = (source / "model.safetensors").stat().st_size
    found = run_processes(SCRIPT, count, tmp_path, json.dumps(MODEL), ref)
    header = 20_000  # each process reads the names and offsets of all tensors, and small tensors
    for process in found:
        assert process["devices"] == 4
        assert process["taken"] <= 1.02 * size / count + header
    (one,) = run_processes(SCRIPT, 1, tmp_path, json.dumps(MODEL), source)
    together = {name: value for process in found for name, value in process["held"].items()}
    assert together.keys() == one["held"].keys()
    for name, value in one["held"].items():
        assert together[name] == pytest.approx(value, rel=1e-6), name
