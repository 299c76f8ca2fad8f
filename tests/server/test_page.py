"""The page, in a real browser, against a real server. What a person sees and does, by the names that a screen reader tells."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from onekv import load_model
from onekv.models.pull import NAMED_MODELS
from scripted import Answer, Scripted, mixed, says
from serving import Served, serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOT = Path(__file__).parents[2] / "docs" / "page.png"
expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.fail("the page is tested in Chromium, which is not installed: apt-get install chromium", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextlib.contextmanager
def visit(browser: Browser, url: str, **settings: Any) -> Iterator[Page]:
    """The page in a window of its own, with settings that make answers repeatable. A script that fails, or one that the security policy
    refuses, fails the test."""
    with contextlib.closing(browser.new_context(**settings)) as context:
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None)
        page.add_init_script("localStorage['onekv.settings'] ??= JSON.stringify({temperature: 0})")
        page.goto(url)
        yield page
        assert wrong == []


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(Scripted(says("Good morning.")), sessions_dir=tmp_path) as served:
        yield served


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with visit(browser, served.url) as page:
        yield page


def column(page: Page, name: str) -> Locator:
    """A conversation."""
    return page.get_by_role("region", name=name, exact=True)


def start(page: Page, name: str) -> Locator:
    """A new conversation."""
    page.get_by_label("Name of a new conversation").fill(name)
    page.get_by_role("button", name="Start").click()
    expect(column(page, name).get_by_label("Message", exact=True)).to_be_focused()
    return column(page, name)


def tell(talk: Locator, text: str, seconds: float = 15) -> None:
    """Send a message and wait for the whole answer."""
    before = messages(talk).count()
    talk.get_by_label("Message", exact=True).fill(text)
    talk.get_by_role("button", name="Send").click()
    expect(messages(talk)).to_have_count(before + 2)
    expect(talk.get_by_role("log")).to_have_attribute("aria-busy", "false", timeout=1000 * seconds)


def messages(talk: Locator) -> Locator:
    return talk.get_by_role("article")


def said(talk: Locator, texts: list[str]) -> None:
    """Wait until this is what was said, and no answer is being made."""
    expect(talk.get_by_role("log")).to_have_attribute("aria-busy", "false")
    expect(talk.locator(".content")).to_have_text(texts)


def press(talk: Locator, action: str, message: str) -> None:
    """An action of one message, such as "Fork" of "user message 1"."""
    talk.get_by_role("article", name=message).hover()
    talk.get_by_role("button", name=f"{action}: {message}").click()


def paused(model: Scripted, answer: Answer, after: int) -> Answer:
    """An answer that stops after so many tokens, until `model.may_go` is set."""
    made = 0

    def told(tokens: list[int]) -> int:
        nonlocal made
        made += 1
        if made == after:
            model.may_go.clear()
        said = answer(tokens)
        assert isinstance(said, int)
        return said

    return told


def counts(page: Page) -> dict[str, int]:
    """The numbers above the map."""
    pairs = [text.split() for text in page.locator("#counts > div").all_inner_texts()]
    return {name: int(number.replace(",", "")) for name, number in pairs}


# --- answers --------------------------------------------------------------------------------------------------------------------


def test_an_answer_is_shown_while_it_is_made(served: Served, page: Page) -> None:
    served.model.answer = paused(served.model, served.model.answer, after=5)
    talk = start(page, "one")
    talk.get_by_label("Message", exact=True).fill("Hello")
    talk.get_by_role("button", name="Send").click()
    expect(messages(talk).last.locator(".content")).to_have_text("Good")
    expect(talk.get_by_role("log")).to_have_attribute("aria-busy", "true")
    served.model.may_go.set()
    expect(messages(talk).last.locator(".content")).to_have_text("Good morning.")
    expect(talk.get_by_role("log")).to_have_attribute("aria-busy", "false")
    said(talk, ["Hello", "Good morning."])


def test_the_numbers_of_a_conversation_are_those_of_its_session(served: Served, page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    tell(talk, "Again")
    (session,) = served.ok("/v1/sessions")["data"]
    expect(talk.locator(".state")).to_contain_text(f"{session['tokens']} tokens · {session['cells']} cells")
    summary = talk.locator("summary", has_text="cached")
    cached, total = map(int, re.findall(r"\d+", summary.inner_text()))
    assert 0 < cached < total
    summary.click()
    expect(talk.get_by_text(f"What comes from position {cached} on had not been evaluated before.")).to_be_visible()


def test_instructions_are_the_first_message_of_an_empty_conversation(served: Served, page: Page) -> None:
    talk = start(page, "one")
    talk.get_by_text("Instructions").click()
    talk.get_by_label("Instructions").fill("Be brief.")
    talk.get_by_label("Message", exact=True).fill("Hello")
    talk.get_by_label("Message", exact=True).press("Enter")
    expect(messages(talk)).to_have_count(3)
    expect(talk.get_by_role("article", name="system message 1")).to_contain_text("Be brief.")
    expect(talk.get_by_text("Instructions")).to_be_hidden()


def test_a_stopped_answer_changes_nothing_and_loses_nothing(served: Served, page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    (before,) = served.ok("/v1/sessions")["data"]
    served.model.answer, served.model.delay = mixed, 0.01  # has no end
    talk.get_by_label("Message", exact=True).fill("Tell me all")
    talk.get_by_role("button", name="Send").click()
    expect(messages(talk).last.locator(".content")).to_have_text(re.compile("[a-z]{3}"))
    talk.get_by_role("button", name="Stop").click()
    expect(talk.get_by_text("Stopped. The conversation is as it was before.")).to_be_visible()
    served.until(served.is_idle)
    (after,) = served.ok("/v1/sessions")["data"]
    assert (after["tokens"], after["busy"]) == (before["tokens"], False)
    expect(talk.get_by_label("Message", exact=True)).to_have_value("Tell me all")
    served.model.answer = says("Well.")
    talk.get_by_label("Message", exact=True).press("Enter")
    expect(messages(talk)).to_have_count(4)
    said(talk, ["Hello", "Good morning.", "Tell me all", "Well."])


def test_two_conversations_answer_at_the_same_time(served: Served, page: Page) -> None:
    one, two = start(page, "one"), start(page, "two")
    served.model.answer = paused(served.model, served.model.answer, after=3)
    for talk in (one, two):
        talk.get_by_label("Message", exact=True).fill("Hello")
        talk.get_by_label("Message", exact=True).press("Enter")
    expect(one.get_by_role("button", name="Stop")).to_be_visible()
    expect(two.get_by_role("button", name="Stop")).to_be_visible()
    served.model.may_go.set()
    for talk in (one, two):
        expect(messages(talk).last.locator(".content")).to_have_text("Good morning.")


def test_text_is_shown_as_text_whatever_it_looks_like(browser: Browser, tmp_path: Path) -> None:
    answer, question, name = "<img src=x onerror=alert(1)>", "<script>alert(2)</script> & <b>bold</b>", "<i>one</i>"
    with serving(Scripted(says(answer)), sessions_dir=tmp_path) as served, visit(browser, served.url) as page:
        page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
        talk = start(page, name)
        tell(talk, question)
        said(talk, [question, answer])
        assert talk.locator("img, script, b, h2 i").count() == 0
        page.reload()
        expect(messages(column(page, name))).to_have_count(2)
        said(column(page, name), [question, answer])


# --- operations -----------------------------------------------------------------------------------------------------------------


def test_a_fork_is_a_column_beside_its_source_and_owns_the_same_cells(served: Served, page: Page) -> None:
    talk = start(page, "one")
    start(page, "other")
    tell(talk, "Hello")
    tell(talk, "Again")
    used = served.engine.stats().used_cells
    press(talk, "Fork", "assistant message 2")
    expect(page.locator(".column")).to_have_count(4)
    twin = page.locator(".column").nth(1)
    expect(twin.get_by_role("heading")).to_have_text("one 2")
    said(twin, ["Hello", "Good morning."])
    assert served.engine.stats().used_cells == used
    tell(twin, "And now?")
    said(twin, ["Hello", "Good morning.", "And now?", "Good morning."])
    said(talk, ["Hello", "Good morning.", "Again", "Good morning."])


@pytest.mark.parametrize("mode", ["Exact", "Shift"])
def test_a_message_is_removed_and_those_after_it_stay(mode: str, served: Served, page: Page) -> None:
    talk = start(page, "one")
    for question in ("Hello", "Look here", "Again"):
        tell(talk, question)
    press(talk, "Remove", "user message 3")
    dialog = page.get_by_role("dialog", name="Remove user message 3")
    expect(dialog).to_contain_text("Look here")
    dialog.get_by_role("radio", name=re.compile(mode)).check()
    dialog.get_by_role("button", name="Remove").click()
    expect(messages(talk)).to_have_count(5)
    said(talk, ["Hello", "Good morning.", "Good morning.", "Again", "Good morning."])
    (session,) = served.ok("/v1/sessions")["data"]
    assert session["exact"] is (mode == "Exact")
    assert ("approximate" in talk.locator(".state").inner_text()) is (mode == "Shift")
    tell(talk, "Go on")
    said(talk, ["Hello", "Good morning.", "Good morning.", "Again", "Good morning.", "Go on", "Good morning."])


def test_a_cancelled_dialog_removes_nothing(page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    press(talk, "Remove", "user message 1")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(talk.get_by_role("button", name="Remove: user message 1")).to_be_focused()
    said(talk, ["Hello", "Good morning."])


def test_rewinding_takes_back_a_message_and_what_follows_and_leaves_its_text_to_be_sent_again(served: Served, page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    tell(talk, "Agein")
    press(talk, "Rewind", "user message 3")
    expect(messages(talk)).to_have_count(2)
    box = talk.get_by_label("Message", exact=True)
    expect(box).to_have_value("Agein")
    expect(box).to_be_focused()
    box.fill("Again")
    box.press("Enter")
    expect(messages(talk)).to_have_count(4)
    said(talk, ["Hello", "Good morning.", "Again", "Good morning."])


def test_restoring_goes_back_to_what_was_saved(page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    talk.get_by_role("button", name="Restore").click()
    expect(talk.get_by_role("alert")).to_contain_text("“one” was not saved")
    talk.get_by_role("button", name="Save").click()
    expect(talk.get_by_text("Saved to the server's disk.")).to_be_visible()
    tell(talk, "Again")
    talk.get_by_role("button", name="Restore").click()
    expect(messages(talk)).to_have_count(2)
    said(talk, ["Hello", "Good morning."])


def test_what_was_saved_is_listed_after_a_restart_and_goes_on(browser: Browser, tmp_path: Path) -> None:
    model = Scripted(says("Good morning."))
    with serving(model, sessions_dir=tmp_path) as served, visit(browser, served.url) as page:
        talk = start(page, "keep me")
        tell(talk, "Hello")
        talk.get_by_role("button", name="Save").click()
        expect(talk.get_by_text("Saved to the server's disk.")).to_be_visible()
    with serving(model, sessions_dir=tmp_path) as served, visit(browser, served.url) as page:
        expect(page.get_by_role("list", name="On the server").get_by_role("listitem")).to_have_count(1)
        page.get_by_role("button", name="Restore keep me").click()
        talk = column(page, "keep me")
        expect(messages(talk)).to_have_count(2)
        tell(talk, "Again")
        said(talk, ["Hello", "Good morning.", "Again", "Good morning."])
        expect(page.get_by_role("list", name="On the server").get_by_role("listitem")).to_have_count(0)


def test_deleting_asks_first_and_gives_back_the_cells(served: Served, page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    talk.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(talk).to_have_count(1)
    talk.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog", name="Delete one?").get_by_role("button", name="Delete").click()
    expect(talk).to_have_count(0)
    assert served.ok("/v1/sessions")["data"] == []


def test_a_closed_conversation_stays_on_the_server_and_can_be_opened(page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    talk.get_by_role("button", name="Close").click()
    expect(talk).to_have_count(0)
    page.reload()
    page.get_by_role("button", name="Open one").click()
    expect(messages(column(page, "one"))).to_have_count(2)
    page.reload()
    expect(messages(column(page, "one"))).to_have_count(2)


# --- the map --------------------------------------------------------------------------------------------------------------------


def test_the_map_counts_shared_cells_and_tells_a_cell_under_pointer_and_keys(served: Served, page: Page) -> None:
    talk = start(page, "one")
    tell(talk, "Hello")
    press(talk, "Fork", "assistant message 2")
    expect(page.locator(".column")).to_have_count(3)
    expect(page.locator("#counts")).to_contain_text(re.compile(r"Shared\s*[1-9]"))
    seen = served.ok("/v1/cells")
    shared = sum(len(owners) > 1 for _, _, owners, *_ in seen["cells"])
    assert counts(page) == {"Used": len(seen["cells"]), "Shared": shared, "Evictable": len(seen["cells"]), "Free": 512 - len(seen["cells"])}
    index, position, _, token, text = seen["cells"][0]
    canvas, readout = page.get_by_role("application", name="Map of cells"), page.locator("#readout")
    canvas.hover(position={"x": 4, "y": 4})
    expect(readout).to_contain_text(f"Cell {index}, position {position}: “{text}”, token {token}")
    expect(readout).to_contain_text("one, one 2 · shared · evictable")
    canvas.focus()
    page.keyboard.press("End")
    expect(readout).to_have_text("Cell 511: free")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text(f"Cell 1, position {seen['cells'][1][1]}")


def test_the_legend_names_the_owners_with_their_cells(served: Served, page: Page) -> None:
    one = start(page, "one")
    tell(one, "Hello")
    two = start(page, "two")
    tell(two, "Something else")
    sessions = {session["name"]: session["cells"] for session in served.ok("/v1/sessions")["data"]}
    for name, cells in sessions.items():
        expect(page.locator("#legend").get_by_role("button", name=f"{name} {cells}", exact=True)).to_be_visible()


def pixel(page: Page, x: int, y: int) -> list[int]:
    """A colour of the map."""
    found: list[int] = page.evaluate(f"[...document.querySelector('canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data]")
    return found


def test_cells_have_their_owners_colour_paler_when_they_can_be_evicted_and_the_free_ones_none(served: Served, page: Page) -> None:
    talk = start(page, "one")
    expect(page.locator("#counts")).to_contain_text("Free")
    free = pixel(page, 4, 4)
    page.mouse.move(0, 0)  # a message under the pointer lights up its cells
    served.model.answer, served.model.delay = says("a" * 80), 0.05  # some seconds; the map waits for the end of a step
    talk.get_by_label("Message", exact=True).fill("Hello")
    talk.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator("#counts")).to_contain_text(re.compile(r"Used\s*[1-9].*Evictable\s*0"))
    full = pixel(page, 4, 4)
    served.model.delay = 0
    expect(page.locator("#counts")).to_contain_text(re.compile(r"Evictable\s*[1-9]"))
    pale = pixel(page, 4, 4)
    assert page.evaluate("getComputedStyle(document.querySelector('.column .swatch')).backgroundColor") == "rgb({}, {}, {})".format(*full)
    assert all(min(f, o) < p < max(f, o) for f, o, p in zip(full[:3], free[:3], pale[:3], strict=True))


def test_a_map_of_32k_cells_has_a_place_for_each(browser: Browser) -> None:
    with serving(Scripted(says("Good morning.")), cells=32_768) as served, visit(browser, served.url) as page:
        expect(page.get_by_text("32,768 cells")).to_be_visible()
        width, height = page.evaluate("(({width, height}) => [width, height])(document.querySelector('canvas'))")
        assert width * height >= 32_768
        page.get_by_role("application", name="Map of cells").focus()
        page.keyboard.press("End")
        expect(page.locator("#readout")).to_have_text("Cell 32767: free")


# --- the person -----------------------------------------------------------------------------------------------------------------


def test_everything_is_done_with_the_keyboard_alone(served: Served, page: Page) -> None:
    expect(page.locator("#model")).not_to_be_empty()
    keys = page.keyboard
    tab_to(page, "new-name")
    keys.type("one")
    keys.press("Enter")
    talk = column(page, "one")
    box = talk.get_by_label("Message", exact=True)
    expect(box).to_be_focused()
    keys.type("Hello")
    keys.press("Shift+Enter")
    keys.type("you")
    keys.press("Enter")
    expect(messages(talk)).to_have_count(2)
    said(talk, ["Hello you", "Good morning."])
    assert messages(talk).first.locator(".content").inner_text() == "Hello\nyou"
    served.model.answer, served.model.delay = mixed, 0.01
    keys.type("More")
    keys.press("Enter")
    expect(messages(talk).last.locator(".content")).to_have_text(re.compile("[a-z]{3}"))
    keys.press("Escape")
    expect(talk.get_by_text("Stopped.")).to_be_visible()
    tab_to(page, "Fork: assistant message 2", back=True)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys.press("Enter")
    expect(page.locator(".column")).to_have_count(3)


def tab_to(page: Page, name: str, *, back: bool = False) -> None:
    """Press Tab until something has the focus, by id or label."""
    for _ in range(40):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if page.evaluate("[document.activeElement.id, document.activeElement.ariaLabel]").count(name):
            return
    raise AssertionError(f"Tab does not come to {name}")


def test_the_theme_follows_the_system_until_one_is_chosen(browser: Browser, served: Served) -> None:
    with visit(browser, served.url, color_scheme="dark") as page:
        expect(page.locator("#counts")).to_contain_text("Free")
        dark, dark_map = background(page), pixel(page, 4, 4)
        page.emulate_media(color_scheme="light")
        light = background(page)
        assert sum(light) > 600 > 150 > sum(dark)
        page.get_by_role("button", name="Use the dark theme").click()
        assert background(page) == dark
        assert pixel(page, 4, 4) == dark_map
        page.reload()
        assert background(page) == dark
        page.get_by_role("button", name="Use the light theme").click()
        assert background(page) == light


def background(page: Page) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))][:3]


def test_a_narrow_window_has_no_sideways_scrolling_but_between_conversations(browser: Browser, served: Served) -> None:
    with visit(browser, served.url, viewport={"width": 360, "height": 640}) as page:
        talk = start(page, "one")
        tell(talk, "Hello")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        expect(talk.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
        page.get_by_role("button", name="Cells").click()
        expect(page.get_by_role("application", name="Map of cells")).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth") == 360


# --- errors ---------------------------------------------------------------------------------------------------------------------


def test_an_error_is_shown_in_its_conversation_and_the_message_is_not_lost(served: Served, page: Page) -> None:
    talk, other = start(page, "one"), start(page, "two")
    box = talk.get_by_label("Message", exact=True)
    box.fill("long " * 200)
    box.press("Enter")
    expect(talk.get_by_role("alert")).to_contain_text("the limit is 512")
    expect(other.get_by_role("alert")).to_have_count(0)
    expect(box).to_have_value("long " * 199 + "long")
    talk.get_by_role("button", name="Dismiss").click()
    box.fill("short")
    box.press("Enter")
    said(talk, ["short", "Good morning."])


def test_an_answer_that_fails_halfway_says_so(served: Served, page: Page) -> None:
    served.model.broken = lambda tokens: tokens[-4:] == list(b"Good")
    talk = start(page, "one")
    talk.get_by_label("Message", exact=True).fill("Hello")
    talk.get_by_label("Message", exact=True).press("Enter")
    expect(talk.get_by_role("alert")).to_contain_text("this row breaks the model")
    expect(talk.get_by_label("Message", exact=True)).to_have_value("Hello")
    said(talk, [])


def test_a_server_that_is_gone_is_said(browser: Browser, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        page = None
        with serving(Scripted(says("Good morning.")), sessions_dir=tmp_path) as served:
            page = stack.enter_context(visit(browser, served.url))
            talk = start(page, "one")
            tell(talk, "Hello")
        talk.get_by_label("Message", exact=True).fill("Still there?")
        talk.get_by_label("Message", exact=True).press("Enter")
        expect(talk.get_by_role("alert")).to_contain_text("The server does not answer.")
        expect(page.locator("#map-error")).to_contain_text("The server does not answer.")


def test_a_key_is_asked_for_once_and_kept_for_the_tab(browser: Browser) -> None:
    with serving(Scripted(says("Good morning.")), api_key="open-sesame") as served, visit(browser, served.url) as page:
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button", name="Use it").click()
        expect(dialog).to_contain_text("does not take this key")
        dialog.get_by_label("Key").fill("open-sesame")
        dialog.get_by_role("button", name="Use it").click()
        tell(start(page, "one"), "Hello")
        page.reload()
        expect(messages(column(page, "one"))).to_have_count(2)
        assert page.evaluate("Object.values(localStorage).join().includes('sesame')") is False


# --- a real model ---------------------------------------------------------------------------------------------------------------


@pytest.mark.demo_model
def test_forks_of_a_real_conversation_share_its_cells(browser: Browser, tmp_path: Path) -> None:
    """Also draws docs/page.png, when ONEKV_SCREENSHOT is set."""
    if not NAMED_MODELS["smollm2"].path.is_file():
        pytest.fail("no demo model; run `make setup`", pytrace=False)
    with (
        serving(load_model("smollm2"), name="smollm2", cells=1024, sessions_dir=tmp_path) as served,
        visit(browser, served.url, viewport={"width": 1440, "height": 860}) as page,
    ):
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens of an answer").fill("80")
        page.get_by_role("button", name="Keep").click()
        talk = start(page, "Questions")
        talk.get_by_text("Instructions").click()
        talk.get_by_label("Instructions").fill("You are a helpful assistant. Answer in one or two short sentences, in plain words.")
        talk.get_by_label("Message", exact=True).fill("What is the capital of France?")
        talk.get_by_label("Message", exact=True).press("Enter")
        expect(messages(talk)).to_have_count(3)  # the instructions, too
        expect(talk.get_by_role("log")).to_have_attribute("aria-busy", "false", timeout=120_000)
        used = served.engine.stats().used_cells
        talk.get_by_role("button", name="Fork", exact=True).click()
        expect(page.locator(".column")).to_have_count(3)
        assert served.engine.stats().used_cells == used
        twin = page.locator(".column").nth(1)
        tell(talk, "Name three animals that can swim.", seconds=120)
        talk.locator("summary", has_text="cached").click()
        twin.get_by_label("Message", exact=True).fill("Why is the sky blue?")
        twin.get_by_label("Message", exact=True).press("Enter")
        expect(messages(twin).last.locator(".content")).to_have_text(re.compile(r"\w+ \w+ \w+"), timeout=60_000)
        expect(page.locator("#counts")).to_contain_text(re.compile(r"Shared\s*[1-9]"))
        if os.environ.get("ONEKV_SCREENSHOT"):
            page.screenshot(path=SCREENSHOT)
        expect(twin.get_by_role("log")).to_have_attribute("aria-busy", "false", timeout=120_000)
