"""Whole models in stores whose connections break: everything is retried, nothing is lost, a dead store is one message."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_building import build_cache
from remote.proxy import Cut, Reply
from remote.test_remote import all_tokens, build_in_this_process, config, text_of

from lmtrain.checkpoint.arrays import load_arrays
from lmtrain.checkpoint.checkpointer import SaveError
from lmtrain.checkpoint.policies import Kind
from lmtrain.checkpoint.staging import local_copy
from lmtrain.config.errors import UserError
from lmtrain.runtime import storage

pytestmark = pytest.mark.long


def model(seed: int) -> dict:
    """A hundred arrays of different sizes."""
    rng = np.random.default_rng(seed)
    return {f"block-{i}": {"kernel": jnp.asarray(rng.normal(size=(i + 1, 7)), jnp.float32)} for i in range(100)}


def every(number: int, *faults: Reply | Cut):
    """One of the faults in turns, for each request with this number as divisor."""
    turns = itertools.cycle(faults)
    return lambda request: next(turns) if request.number % number == 0 else None


FAULTS = {
    "busy": every(7, Reply(429), Reply(503)),
    "reset": every(9, Cut.BEFORE, Cut.INSTEAD),
    "truncated": every(9, Cut.WITHIN),
}


def same(loaded, saved) -> bool:
    pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


@pytest.mark.parametrize("fault", FAULTS)
def test_saves_and_loads_of_a_model_survive(fault, make, store, proxy, staging):
    checkpointer = make(keep=[{"every": 2}])
    proxy.refuse = FAULTS[fault]
    for step in (1, 2, 3):
        kind = Kind.PERMANENT if step == 2 else Kind.TEMPORARY
        checkpointer.save_now(step, kind, {"params": model(step)}, {})
    newest = checkpointer.newest()
    assert newest.step == 3
    anywhere = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=anywhere), model(0))
    with local_copy(newest, ["params"], str(staging)) as path:
        assert same(load_arrays(path, "params", like), model(3))
    assert len(proxy.refused) >= 10
    proxy.refuse = lambda request: None
    assert {name.partition("/")[0] for name in store.contents("run")} == {"attempt.json", "step-2", "step-3"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cache_is_built_and_read(fault, store, proxy, tmp_path, monkeypatch):
    build_in_this_process(monkeypatch)
    for number in range(4):
        store.put(f"text/b{number}.jsonl.gz", text_of(f"b{number}.jsonl.gz"))
    expected = config(store.url, cache_dir=str(tmp_path / "local"))
    build_cache(expected, "train")
    proxy.refuse = FAULTS[fault]
    found = config(store.url, mirror_dir=str(tmp_path / "mirror"))
    build_cache(found, "train")
    assert all_tokens(found) == all_tokens(expected)
    assert proxy.refused


def test_a_slow_store_delays_only(make, store, proxy):
    checkpointer = make()
    proxy.delay = lambda request: 0.3 if request.number % 5 == 0 else 0
    checkpointer.save_now(1, Kind.PERMANENT, {"params": {"a": jnp.ones(3)}}, {})
    assert checkpointer.newest().step == 1


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.INSTEAD])
def test_a_dead_store_ends_in_one_message(cut, make, store, proxy, caplog):
    url = store.put("a", b"content")
    checkpointer = make()
    proxy.refuse = lambda request: cut
    with pytest.raises(UserError) as caught:
        storage.read_bytes(url)
    assert str(caught.value).startswith(f"{url}: cannot be read: ")
    with pytest.raises(SaveError), caplog.at_level(logging.ERROR):
        checkpointer.save_now(1, Kind.PERMANENT, {"params": {"a": jnp.ones(3)}}, {})
    assert len(caplog.messages) == 1, caplog.messages
    proxy.refuse = lambda request: None
    checkpointer.save_now(2, Kind.PERMANENT, {"params": {"a": jnp.ones(3)}}, {})
    assert checkpointer.newest().step == 2
