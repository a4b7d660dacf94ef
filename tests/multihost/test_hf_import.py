"""Each process reads its share of a Hugging Face model, from disk or a URL, and the model is the same."""

import http.server
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from flax.core.meta import unbox
from multihost.processes import finished, run_processes
from safetensors.numpy import save_file

from lmtrain.hf.key_map import flatten, to_hf, unflatten
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import build_model, hf_family
from lmtrain.run.config import RunConfig

SCRIPT = Path(__file__).with_name("read_hf_params.py")
VOCAB = 500  # not a multiple of the number of devices
MODEL = {"type": "llama", "hidden_dim": 256, "num_heads": 4, "num_layers": 2, "seq_len": 32,
         "intermediate_dim": 600, "pad_vocab_to_multiple_of": 8}  # fmt: skip


def tensors(model):
    """A model's weights in the Hugging Face format."""
    config = RunConfig.model_validate({"model": model}).model
    rng = np.random.default_rng(0)
    abstract = flatten(unbox(abstract_params(build_model(config, VOCAB))))
    tree = unflatten({path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in abstract.items()})
    return to_hf(hf_family("llama").table(config), tree, config.num_layers, VOCAB)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with one file of weights."""
    folder = tmp_path_factory.mktemp("model")
    save_file(tensors(MODEL), folder / "model.safetensors")
    return folder


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Answers range requests, as object stores do."""

    def do_GET(self):
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

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url(source):
    def handler(*arguments):
        return Ranges(*arguments, directory=source)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def load(ref, count, folder):
    """The bytes that each of `count` processes read, and the shards that it holds."""
    return finished(SCRIPT, count, folder, json.dumps(MODEL), ref)


@pytest.mark.parametrize(
    ("place", "count"),
    [("disk", 4), pytest.param("url", 4, marks=pytest.mark.long), pytest.param("disk", 2, marks=pytest.mark.long)],
)
def test_each_process_reads_its_share_and_all_hold_the_same_model(source, url, place, count, tmp_path):
    ref = str(source) if place == "disk" else url
    size = (source / "model.safetensors").stat().st_size
    found = load(ref, count, tmp_path)
    header = 20_000  # each process reads the names and offsets of all tensors, and small tensors
    for process in found:
        assert process["devices"] == 4
        assert process["taken"] <= 1.02 * size / count + header
    one = load(str(source), 1, tmp_path)[0]
    together = {name: value for process in found for name, value in process["held"].items()}
    assert together.keys() == one["held"].keys()
    for name, value in one["held"].items():
        assert together[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.long
@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_head_stored_in_the_file_is_compared_in_shares(tmp_path, differs):
    """All processes end with the error if it differs anywhere."""
    model = MODEL | {"tie_word_embeddings": True}
    stored = tensors(model)
    head = stored["model.embed_tokens.weight"].copy()
    head[-1, -1] += differs
    save_file(stored | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    for code, output, found in run_processes(SCRIPT, 4, tmp_path, json.dumps(model), tmp_path):
        if differs:
            assert code != 0
            assert "lm_head.weight differs from model.embed_tokens.weight" in output
        else:
            size = (tmp_path / "model.safetensors").stat().st_size + head.nbytes  # the embedding is read twice
            assert code == 0, output
            assert found["taken"] <= 1.02 * size / 4 + 20_000
