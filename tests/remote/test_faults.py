"""Stores that refuse requests, reset connections, truncate or garble answers: all is retried, nothing is lost."""

import asyncio
import itertools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_building import build_cache
from remote.conftest import forget_file_systems
from remote.proxy import BUSY, Cut, Reply, Request, every
from remote.test_export import PLAN, TENSORS
from remote.test_remote import all_tokens, build_in_this_process, config, text_of
from servers import free_ports

from lmtrain.checkpoint import arrays
from lmtrain.checkpoint.arrays import load_arrays
from lmtrain.checkpoint.checkpointer import Checkpointer, SaveError
from lmtrain.checkpoint.config import Kind
from lmtrain.checkpoint.staging import local_copy
from lmtrain.runtime import remote, storage
from lmtrain.runtime.errors import UserError
from lmtrain.weights.write_export import write_export

SMALL = {"w": jnp.arange(6, dtype=jnp.float32)}

both = pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.long)], indirect=True)


def model(seed: int) -> dict:
    """A hundred arrays of different sizes."""
    rng = np.random.default_rng(seed)
    return {f"block-{i}": {"kernel": jnp.asarray(rng.normal(size=(i + 1, 7)), jnp.float32)} for i in range(100)}


def save(checkpointer: Checkpointer, step: int, params: dict = SMALL, kind: Kind = Kind.PERMANENT) -> None:
    checkpointer.save_now(step, kind, {"params": params}, {})


def load(checkpoint, staging, params: dict) -> None:
    """Load the parameters and compare them bit by bit with `params`."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), params)
    with local_copy(checkpoint, ["params"], str(staging)) as path:
        loaded = load_arrays(path, "params", like)
    pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True)
    assert all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def folders(store) -> set[str]:
    return {name.partition("/")[0] for name in store.contents("run")}


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Seconds that the event loop's tasks wait; they do not wait that long."""
    waited, sleep = [], asyncio.sleep

    async def record(seconds: float, *more: object) -> object:
        waited.append(seconds)
        return await sleep(0, *more)

    monkeypatch.setattr(asyncio, "sleep", record)
    monkeypatch.setattr(remote, "_next_message", 0.0)
    return waited


@both
def test_a_throttled_store_delays_a_save_by_fractions_of_a_second_and_the_reason_is_logged(
    proxy, make, store, waits, caplog, staging
):
    proxy.refuse = every(10, *BUSY)
    checkpointer = make()
    save(checkpointer, 1)
    newest = checkpointer.newest()
    load(newest, staging, SMALL)
    assert newest.step == 1
    assert len(proxy.refused) >= 5
    if store.scheme == "gs":  # gcsfs itself waits for a second or more; botocore for a random part of a second
        assert max(waits) < 1
    assert "127.0.0.1: HTTP " in caplog.text
    proxy.refuse = lambda request: None


@pytest.fixture(params=["busy", "reset", "lost answers", "truncated"])
def fault(request):
    """A fault of each fifth request."""
    faults = {"busy": BUSY, "reset": [Cut.BEFORE], "lost answers": [Cut.INSTEAD], "truncated": [Cut.WITHIN]}
    return every(5, *faults[request.param])


@pytest.mark.long
def test_a_model_of_many_arrays_is_saved_and_loaded_through_faults(fault, proxy, make, store, waits, caplog, staging):
    checkpointer = make(keep=[{"every": 2}])
    proxy.refuse = fault
    for step in (1, 2, 3):
        save(checkpointer, step, model(step), Kind.PERMANENT if step == 2 else Kind.TEMPORARY)
    newest = checkpointer.newest()
    assert newest.step == 3
    load(newest, staging, model(3))
    assert len(proxy.refused) >= 15
    proxy.refuse = lambda request: None
    assert folders(store) == {"attempt.json", "step-2", "step-3"}
    assert "could not be" not in caplog.text  # no save or deletion needed a second attempt


@pytest.mark.long
def test_a_cache_is_built_and_read_and_a_model_exported_through_faults(
    fault, proxy, store, waits, tmp_path, monkeypatch
):
    build_in_this_process(monkeypatch)
    for number in range(4):
        for letter in "ab":
            store.put(f"text/{letter}{number}.jsonl.gz", text_of(f"{letter}{number}.jsonl.gz"))
    local = config(store.url, cache_dir=str(tmp_path / "local"))
    build_cache(local, "train")
    write_export(str(tmp_path / "model"), PLAN, TENSORS, shard_bytes=20_000)
    proxy.refuse = fault
    remote = config(store.url, mirror_dir=str(tmp_path / "mirror"))
    build_cache(remote, "train")
    assert all_tokens(remote) == all_tokens(local)
    write_export(f"{store.url}/model", PLAN, TENSORS)  # in one file, which must be deleted
    write_export(f"{store.url}/model", PLAN, TENSORS, shard_bytes=20_000)
    storage.rename_folder(f"{store.url}/text", f"{store.url}/moved")
    storage.delete_folder(f"{store.url}/moved")
    assert len(proxy.refused) >= 15
    proxy.refuse = lambda request: None
    for name, written in (("cache/train", tmp_path / "local" / "train"), ("model", tmp_path / "model")):
        found = store.contents(name)
        for path in written.iterdir():
            assert path.suffix == ".json" or found[path.name] == path.read_bytes()
        assert found.keys() == {path.name for path in written.iterdir()}
    assert {name.partition("/")[0] for name in store.contents()} == {"cache", "model"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, by gcsfs
def test_large_files_are_uploaded_through_resets(proxy, store, waits, tmp_path):
    content = bytes(range(256)) * 20_000
    (tmp_path / "large").write_bytes(content)
    proxy.refuse = every(3, Cut.BEFORE, Cut.INSTEAD)
    for number in range(6):
        storage.upload(str(tmp_path / "large"), f"{store.url}/{number}")
    assert len(proxy.refused) >= 2
    proxy.refuse = lambda request: None
    assert set(store.contents().values()) == {content}


@pytest.mark.long
@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.INSTEAD])
def test_a_store_that_dies_during_a_save_ends_in_one_error_and_earlier_checkpoints_are_unchanged(
    cut, proxy, make, store, waits, monkeypatch, caplog
):
    monkeypatch.setitem(arrays._RETRIES, "max_retries", 3)  # TensorStore itself waits, in its own threads
    checkpointer = make()
    save(checkpointer, 1, model(1))
    before = store.contents("run/step-1")
    alive = itertools.count(1)
    proxy.refuse = lambda request: cut if next(alive) > 12 else None
    caplog.clear()
    threads = threading.enumerate()
    with pytest.raises(SaveError, match="step 2"):
        save(checkpointer, 2, model(2))
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR and record.name == "lmtrain"]
    # Orbax's, which would wait for each other for minutes, and the end of the process for them
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread not in threads]
    for thread in others:
        thread.join(1)
    assert [thread for thread in others if thread.is_alive()] == []
    first, second = [record.getMessage() for record in logged]
    assert "step 2" in first
    assert f"{store.url}/run/attempt.json" in second
    proxy.refuse = lambda request: None
    save(checkpointer, 3)
    assert checkpointer.newest().step == 3
    assert store.contents("run/step-1") == before
    assert folders(store) == {"attempt.json", "step-1", "step-3"}


@pytest.mark.long
@pytest.mark.parametrize("cut", ["refused", *Cut])
def test_a_command_reports_a_dead_store_in_one_message(
    cut, proxy, store, waits, monkeypatch, settings, write_config, run_cli
):
    """After repeated requests, which take a minute or two, at most five."""
    settings["trainer"]["checkpointer"] = {"base_path": f"{store.url}/run"}
    write_config(settings)
    if cut == "refused":
        (port,) = free_ports(1)
        for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        forget_file_systems()
    else:
        proxy.refuse = lambda request: cut
    for command in (
        ["train", "tiny.yaml"],
        ["preprocess", f"{store.url}/tiny.yaml"],
        ["checkpoint", "list", store.url],
    ):
        waits.clear()
        ended = run_cli(*command, code=2)
        message = ended.stderr[ended.stderr.index("lmtrain: error: ") :].splitlines()
        assert len(message) == 2, message
        assert store.url in message[0]
        assert sum(waits) < 300


@both
def test_garbled_answers_are_read_again_before_a_checkpoint_counts_as_corrupt(proxy, make, store, waits, staging):
    checkpointer = make()
    for step in (1, 2):
        save(checkpointer, step)
    garbled: list[Request] = []
    lock = threading.Lock()

    def garble(request: Request, body: bytes) -> bytes:
        """Change every third answer with the content of a file, each in another byte."""
        if request.method != "GET" or "step-" not in request.path or "prefix" in request.path or not body:
            return body
        if store.scheme == "gs" and "alt=media" not in request.path:
            return body
        with lock:
            garbled.append(request)
            if len(garbled) % 3:
                return body
            place = len(garbled) // 3 % len(body)
        return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]

    proxy.garble = garble
    for _ in range(3):
        newest = checkpointer.newest()
        assert newest.step == 2
        with local_copy(newest, ["params"], str(staging)):
            pass
    assert len(garbled) >= 9
    proxy.garble = lambda request, body: body
    assert {name.partition("/")[0] for name in store.contents("run")} == {"attempt.json", "step-1", "step-2"}


@pytest.mark.parametrize(("status", "body"), [(503, b'{"error": {"code": 503, "message": "Busy"}}'), (502, b"")])
@pytest.mark.parametrize("scheme", ["gs"], indirect=True)
def test_messages_have_the_status_and_the_text_of_the_server(store, proxy, waits, status, body):
    url = store.put("a", b"content")
    proxy.refuse = lambda request: Reply(status, body)
    with pytest.raises(UserError) as caught:
        storage.read_bytes(url)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{url}: ")
    assert f"HTTP {status}" in first
    assert ("Busy" in first) == bool(body)
    assert sum(waits) < 90


@both
def test_checkpoints_are_not_set_aside_if_every_answer_is_garbled(make, store, proxy, waits):
    checkpointer = make()
    for step in (1, 2):
        save(checkpointer, step)
    counts = iter(range(1, 10_000))
    proxy.garble = lambda request, body: (
        body[:-2] + next(counts).to_bytes(2) if request.method == "GET" and "commit_success" in request.path else body
    )
    with pytest.raises(UserError, match=r"cannot be checked: .*commit_success\.txt"):
        checkpointer.newest()
    proxy.garble = lambda request, body: body
    names = {name.partition("/")[0] for name in store.contents("run")}
    assert names == {"attempt.json", "step-1", "step-2"}
