"""Stores that refuse some requests, and networks that change some answers."""

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remote.proxy import Reply, Request, throttle

from lmtrain.checkpoint.arrays import load_arrays
from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.policies import Kind
from lmtrain.checkpoint.staging import local_copy
from lmtrain.config import retries
from lmtrain.config.errors import UserError
from lmtrain.runtime import storage

PARAMS = {"w": jnp.arange(6, dtype=jnp.float32)}

both = pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.long)], indirect=True)


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save_now(step, Kind.PERMANENT, {"params": PARAMS}, {})


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Seconds that the event loop's tasks wait; they do not wait that long."""
    waited, sleep = [], asyncio.sleep

    async def record(seconds: float, *more: object) -> object:
        waited.append(seconds)
        return await sleep(0, *more)

    monkeypatch.setattr(asyncio, "sleep", record)
    monkeypatch.setattr(retries, "_next_message", 0.0)
    return waited


@both
def test_a_throttled_store_delays_a_save_by_fractions_of_a_second_and_the_reason_is_logged(
    proxy, make, store, waits, caplog, staging
):
    proxy.refuse = throttle
    checkpointer = make()
    save(checkpointer, 1)
    newest = checkpointer.newest()
    with local_copy(newest, ["params"], str(staging)) as path:
        target = {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=PARAMS["w"].sharding)}
        np.testing.assert_array_equal(load_arrays(path, "params", target)["w"], PARAMS["w"])
    assert newest.step == 1
    assert len(proxy.refused) >= 5
    if store.scheme == "gs":  # gcsfs itself waits for a second or more; botocore for a random part of a second
        assert max(waits) < 1
    assert "127.0.0.1: HTTP " in caplog.text
    proxy.refuse = lambda request: None


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


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, b'{"error": {"code": 503, "message": "Backend Error"}}', "HTTP 503 Service Unavailable: Backend Error"),
        (429, b"<html><h1>Slow down</h1></html>", "HTTP 429 Too Many Requests: Slow down"),
        (502, b"", "HTTP 502 Bad Gateway"),
    ],
)
@pytest.mark.parametrize("scheme", ["gs"], indirect=True)
def test_messages_have_the_status_and_the_text_of_the_server(store, proxy, waits, status, body, reason):
    url = store.put("a", b"content")
    proxy.refuse = lambda request: Reply(status, body)
    with pytest.raises(UserError) as caught:
        storage.read_bytes(url)
    first, second = str(caught.value).splitlines()
    assert first == f"{url}: cannot be read: {reason}"
    assert second == "  the server is overloaded or unavailable: repeated requests failed too"
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
