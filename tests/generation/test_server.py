"""The chat server: OpenAI's own client gets the replies of a conversation; damaged and foreign requests are refused."""

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import openai
import pytest
from chat_server import LENGTH, serve

from lmtrain.generation.chat import Chat
from lmtrain.generation.decode import SamplingSettings


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("chat"), parallel=3) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(client, text, **more):
    settings = {"temperature": 0, "max_tokens": 8} | more
    return client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}], **settings)


def expected(served, text, count=8):
    settings = SamplingSettings(count, temperature=0)
    return "".join(Chat(served.model, served.params, served.tokenizer, served.template, LENGTH, settings).say(text))


def test_a_reply_is_that_of_a_conversation_as_a_whole_and_as_a_stream(served, client):
    found = ask(client, "Stars?")
    (choice,) = found.choices
    assert choice.message.content == expected(served, "Stars?")
    assert choice.finish_reason == "length"
    assert (found.usage.completion_tokens, found.usage.total_tokens - found.usage.prompt_tokens) == (8, 8)
    parts = list(ask(client, "Stars?", stream=True, stream_options={"include_usage": True}))
    pieces = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(pieces) == choice.message.content
    assert len([piece for piece in pieces if piece]) > 2
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage.prompt_tokens_details.cached_tokens == found.usage.prompt_tokens - 1
    assert [model.id for model in client.models.list()] == [served.name]
    assert client.models.retrieve(served.name).id == served.name


def test_replies_at_the_same_time_are_those_of_each_alone(served, client):
    texts = [f"{number} stars?" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda text: ask(client, text).choices[0].message.content, texts))
    assert found == [expected(served, text) for text in texts]


def test_samples_follow_the_seed_and_several_choices_differ(client):
    def sample(seed, n=1):
        found = ask(client, "Rain?", temperature=1.5, seed=seed, n=n, max_tokens=20, extra_body={"top_k": 0})
        return [choice.message.content for choice in found.choices]

    first, second = sample(3, n=2)
    assert first != second
    assert sample(3) == [first]
    assert sample(4) == [second]
    assert sample(None) != sample(None)


def test_a_stop_ends_the_text_before_it(served, client):
    whole = expected(served, "Stars?", 30)
    stop = whole[10:12]
    for streams in (False, True):
        found = ask(client, "Stars?", max_tokens=30, stop=[stop, "never"], stream=streams)
        if streams:
            parts = [part.choices[0] for part in found]
            text, reason = "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason
        else:
            text, reason = found.choices[0].message.content, found.choices[0].finish_reason
        assert (text, reason) == (whole[: whole.index(stop)], "stop")


def test_a_client_that_leaves_ends_its_reply(served, client):
    for _ in range(6):  # twice as many as there are rows
        stream = ask(client, "Stars?", max_tokens=LENGTH, stream=True)
        next(stream)
        stream.close()
    step, steps, left = served.engine.step, [], threading.Event()
    served.engine.step = lambda: steps.append(left.wait(30)) or step()  # no token comes before the client has left
    body = {"messages": [{"role": "user", "content": "Stars?"}], "n": 16, "max_tokens": LENGTH}
    with closing(http.client.HTTPConnection(served.url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        while not served.engine.is_busy:
            time.sleep(0.01)
    left.set()
    while served.engine.is_busy:
        time.sleep(0.01)
    served.engine.step = step
    assert len(steps) < 300  # 16 replies in 3 rows take about 500
    assert ask(client, "Stars?").choices[0].message.content == expected(served, "Stars?")


@pytest.mark.parametrize(
    ("settings", "param", "code"),
    [
        ({"temperature": -1}, "temperature", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"n": 1000}, "n", None),
        ({"logit_bias": {"5": 10}}, "logit_bias", None),
        ({"frequency_penalty": 0.5}, "frequency_penalty", None),
        ({"response_format": {"type": "json_object"}}, "response_format", None),
        ({"stop": [""]}, "stop", None),
        ({"extra_body": {"min_p": 0.1}}, "min_p", None),
        ({"stream": "true"}, "stream", None),
        ({"stream_options": {"include_usage": "no"}}, "include_usage", None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "messages", None),
        ({"messages": [{"role": "foo", "content": "Stars?"}]}, "messages", None),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "messages", None),
        ({"messages": []}, "messages", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            None,
        ),
        ({"messages": [{"role": "user", "content": "stars " * LENGTH}]}, "messages", "context_length_exceeded"),
    ],
)
def test_a_request_that_cannot_be_answered_names_the_setting(client, settings, param, code):
    messages = [{"role": "user", "content": "Stars?"}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "any", "messages": messages} | settings)
    assert (error.value.param, error.value.code) == (param, code)


def request(served, method, path, body=None, **headers):
    with closing(http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=30)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response, response.read()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({}, 200),
    ],
)
def test_other_hosts_and_pages_of_other_sites_are_refused(served, headers, status):
    response, content = request(served, "GET", "/settings", **headers)
    assert response.status == status
    assert ("error" in json.loads(content)) == (status == 403)


def test_paths_and_bodies_that_make_no_sense_are_errors(served):
    for method, path, body, status in (
        ("GET", "/nothing", None, 404),
        ("POST", "/v1/completions", b"{}", 404),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b'{"messages": ' + b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}', 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b'{"messages": "Stars?"}', 400),
        ("POST", "/v1/chat/completions", b'{"messages": [{"content": "Stars?"}]}', 400),
    ):
        response, content = request(served, method, path, body)
        assert response.status == status
        assert json.loads(content)["error"]["message"]


def test_the_template_and_its_tokens_are_shown(served):
    messages = [{"role": "user", "content": "Stars?"}]
    _, content = request(served, "POST", "/render", json.dumps({"messages": messages}))
    found = json.loads(content)
    assert found["text"] == served.template.render(messages, add_generation_prompt=True).text
    assert "".join(token["text"] for token in found["tokens"]) == found["text"]
    ids = served.tokenizer.parsing_backend.encode(found["text"], add_special_tokens=False).ids
    assert [token["id"] for token in found["tokens"]] == ids


def test_an_error_of_the_model_reaches_every_client(tmp_path):
    with serve(tmp_path, parallel=1) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        served.engine.step = lambda: 1 / 0
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
                ask(client, "Stars?")
        assert threading.active_count() < 50
