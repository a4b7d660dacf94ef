"""The chat page in a real Chromium (tools/install_servers.sh)."""

import os
import re
import time
from pathlib import Path

import pytest
from chat_server import serve
from playwright.sync_api import expect, sync_playwright

from lmtrain.generation.chat import Chat
from lmtrain.generation.decode import SamplingSettings

pytestmark = pytest.mark.long

PACKAGES = Path(__file__).parents[2] / ".servers"
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/pulseaudio")
LENGTH, NEW = 2048, 12


@pytest.fixture(scope="module")
def chromium():
    # without its background services, whose hosts it looks up at every start
    quiet = [f"--disable-{what}" for what in ("gpu", "background-networking", "component-update", "sync")]
    path = os.pathsep.join(str(PACKAGES / folder) for folder in LIBRARIES)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=PACKAGES / "usr/lib/chromium/chromium",
            args=["--no-sandbox", *quiet],
            env={**os.environ, "LD_LIBRARY_PATH": path},
        )
        yield browser
        browser.close()


@pytest.fixture
def served(tmp_path):
    with serve(tmp_path, parallel=2, length=LENGTH, max_new_tokens=NEW, temperature=0.0) as served:
        yield served


@pytest.fixture
def page(chromium, served):
    """The page, which has no errors and loads nothing from elsewhere."""
    page, problems = chromium.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda asked: None if asked.url.startswith(served.url) else problems.append(asked.url))
    page.goto(served.url)
    yield page
    page.close()
    assert [problem for problem in problems if "400" not in problem] == []


def send(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def replies(page, number):
    """The texts of all replies, when there are `number` and none is being written."""
    expect(page.locator(".assistant div")).to_have_count(number)
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    return page.locator(".assistant div").all_text_contents()


def test_a_conversation_in_the_browser_is_that_of_the_terminal(page, served):
    expect(page.locator("#model")).to_have_text(f"tiny/model, context {LENGTH}")
    settings = SamplingSettings(NEW, temperature=0)
    chat = Chat(served.model, served.params, served.tokenizer, served.template, LENGTH, settings)
    said = []
    for number, text in enumerate(("Stars?", "Rain\nor snow?"), start=1):
        send(page, text)
        said.append("".join(chat.say(text)))
        assert replies(page, number) == said
    assert page.locator(".user div").all_text_contents() == ["Stars?", "Rain\nor snow?"]
    expect(page.locator("#usage")).to_have_text(re.compile(rf"\+ {NEW} tokens, \d+ cached, cut off"))

    page.get_by_label("Show tokens").check()
    messages = [{"role": "user", "content": "Stars?"}, {"role": "assistant", "content": said[0]}]
    messages += [{"role": "user", "content": "Rain\nor snow?"}, {"role": "assistant", "content": said[1]}]
    text = served.template.render(messages).text
    ids = served.tokenizer.parsing_backend.encode(text, add_special_tokens=False).ids
    expect(page.locator("#tokens span")).to_have_count(len(ids))
    assert page.locator("#tokens span").first.get_attribute("title") == f"token {ids[0]}"

    page.get_by_label("Temperature").fill("1.5")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant div").nth(1)).not_to_have_text(said[1])
    assert replies(page, 2)[0] == said[0]

    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("System").fill("Be brief.")
    send(page, "Stars?")
    chat = Chat(served.model, served.params, served.tokenizer, served.template, LENGTH, settings, system="Be brief.")
    assert replies(page, 1) == ["".join(chat.say("Stars?"))]


def test_a_reply_is_shown_as_it_comes_and_stop_ends_it(page, served):
    step = served.engine.step
    served.engine.step = lambda: time.sleep(0.01) or step()
    page.get_by_label("Maximum tokens").fill("1500")
    send(page, "Stars?")
    expect(page.locator(".assistant div")).not_to_have_text("")
    page.get_by_role("button", name="Stop").click()
    (text,) = replies(page, 1)
    assert 0 < len(served.tokenizer.parsing_backend.encode(text, add_special_tokens=False).ids) < 1400
    while served.engine.is_busy:
        time.sleep(0.01)
    page.get_by_label("Maximum tokens").fill("3")
    send(page, "And now?")
    assert replies(page, 2)[0] == text


def test_a_refused_message_can_be_changed(page):
    send(page, "Stars?")
    first = replies(page, 1)
    send(page, "stars " * LENGTH)
    expect(page.get_by_role("alert")).to_contain_text(f"context of {LENGTH}")
    expect(page.get_by_label("Message")).to_have_value(("stars " * LENGTH).strip())
    page.get_by_label("Maximum tokens").fill("")  # that of the server
    page.get_by_label("Show tokens").check()
    send(page, "Rain?")
    assert replies(page, 2)[:1] == first
    expect(page.get_by_role("alert")).to_have_text("")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#tokens span")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_text("")
