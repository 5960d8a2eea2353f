"""The playground in a real browser, against a stand-in server that streams what a test wrote down."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import flashspec

FILE = Path(flashspec.__file__).parent / "server" / "page.html"
CHROMIUM = Path("/usr/bin/chromium")
CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
PREFIX = "/behind/a/proxy/"  # relative addresses have to work
XSS = "<img src=x onerror=\"document.title='caught'\">"
LONG = "Donaudampfschifffahrtsgesellschaft" * 6
Step = dict[str, Any] | bytes | float | threading.Event  # data, raw bytes, seconds to wait, something to wait for
DONE = b"data: [DONE]\n\n"


@dataclass
class Reply:
    steps: list[Step] = field(default_factory=list)
    status: int = 200
    ending: str = "closed"  # properly; "cut"; "endless": comments until the client has gone


class StandIn(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: deque[Reply] = deque()
        self.asked: list[tuple[str, dict[str, Any]]] = []  # (path, body)
        self.keys: list[str | None] = []  # Authorization of every request
        self.events: list[str] = []
        self.has_left = threading.Event()  # the client, before the end

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def will(self, *steps: Step, **how: Any) -> None:
        self.replies.append(Reply(list(steps), **how))


def data(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def torn(content: dict[str, Any]) -> list[Step]:
    """The data in three reads: cut inside its first character of several bytes, and before its last line end."""
    sent = data(content)
    at = next(i for i, byte in enumerate(sent) if byte > 127) + 1
    return [sent[:at], 0.05, sent[at:-1], 0.05, sent[-1:]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", CSP)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        if self.path == PREFIX:
            return self.answer(200, "text/html; charset=utf-8", FILE.read_bytes())
        known = self.path == f"{PREFIX}v1/models"
        return self.answer(200 if known else 404, "application/json", b'{"data": [{"id": "tiny"}, {"id": "big"}]}')

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path.removeprefix(PREFIX), body))
        self.server.events.append("began")
        reply = self.server.replies.popleft()
        if reply.status != 200:
            raw = reply.steps[0]
            return self.answer(reply.status, "any", raw if isinstance(raw, bytes) else json.dumps(raw).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self.stream(reply)
        except OSError:
            self.server.has_left.set()
            self.close_connection = True
        self.server.events.append("ended")
        return None

    def stream(self, reply: Reply) -> None:
        for step in reply.steps:
            if isinstance(step, threading.Event):
                step.wait(60)
            elif isinstance(step, float):
                time.sleep(step)
            else:
                self.send(step if isinstance(step, bytes) else data(step))
        until = time.monotonic() + 60
        while reply.ending == "endless" and time.monotonic() < until:
            self.send(b": still here\n\n")
            time.sleep(0.02)
        if reply.ending == "closed":
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def send(self, sent: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(sent), sent))


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"], headless=True)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any, server: StandIn) -> Iterator[Any]:
    """The open page; whatever it does, it says nothing on the console and asks no other host."""
    complaints: list[str] = []
    hosts: set[str] = set()
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.set_default_timeout(30_000)
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: hosts.add("/".join(request.url.split("/")[:3])))
    tab.goto(server.origin + PREFIX)
    says(tab, "Ready.")
    yield tab
    tab.close()
    # the browser's own lines about bad statuses and broken connections
    assert [line for line in complaints if not line.startswith("Failed to load resource")] == []
    assert hosts == {server.origin}


def says(tab: Any, text: str) -> None:
    tab.wait_for_function("text => document.getElementById('status').textContent.includes(text)", arg=text)


def shows(tab: Any, end: str) -> None:
    """Wait for the end of the answer so far."""
    tab.wait_for_function("end => document.querySelector('#on .text').textContent.endsWith(end)", arg=end)


def run(tab: Any, says_then: str = "Done") -> None:
    tab.get_by_role("button", name="Run").click()
    says(tab, says_then)


def box(tab: Any, pane: str = "on") -> str:
    return str(tab.locator(f"#{pane} .text").evaluate("box => box.textContent"))


def numbers(tab: Any, pane: str = "on") -> dict[str, str]:
    found = tab.locator(f"#{pane} dd").evaluate_all("all => all.map(dd => [dd.dataset.stat, dd.textContent])")
    return dict(found)


def tokens(tab: Any, pane: str = "on") -> list[tuple[str, str]]:
    spans = tab.locator(f"#{pane} .tok").evaluate_all("all => all.map(s => [s.textContent, s.dataset.kind])")
    return [(text, kind) for text, kind in spans]


def chunk(pieces: list[str], kinds: list[str], draft: list[dict[str, Any]], route: str = "chat") -> dict[str, Any]:
    text = "".join(pieces)
    speculation = {"tokens": list(range(len(pieces))), "pieces": pieces, "kinds": kinds, "drafter": "suffix"}
    choice = {"index": 0, "delta": {"content": text}} if route == "chat" else {"index": 0, "text": text}
    return {"choices": [choice], "speculation": speculation | {"draft": draft}}


def node(text: str, parent: int, accepted: bool = False) -> dict[str, Any]:
    return {"text": text, "parent": parent, "accepted": accepted}


def summary(count: int, rate: float = 0.5, tps: float = 40.0, ttft: float = 25.0, drafts: int = 2) -> dict[str, Any]:
    counts = {
        "num_drafts": drafts, "num_draft_tokens": 8, "num_accepted_tokens": 4, "mean_acceptance_length": 3.25,
        "draft_acceptance_rate": rate, "acceptance_by_position": [0.75, 0.5],
    }  # fmt: skip
    usage = {"prompt_tokens": 34, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 12}}
    metrics = {"time_to_first_token_ms": ttft, "tokens_per_second": tps, "speculative_decoding": counts}
    return {"choices": [], "usage": usage, "metrics": metrics}


FIRST = chunk(["你"], ["bonus"], [])
SECOND = chunk(
    ["好，", "", "", "🚀", " go"], ["accepted"] * 4 + ["bonus"], [node(t, i - 1, True) for i, t in enumerate("好��🚀")]
)
TREE = [
    node(" a", -1), node(" b", -1, True), node(" c", -1),
    node("x", 1), node("y", 1, True), node("z", 1),
    node("1", 4), node("2", 4), node("3", 4),
]  # fmt: skip
THIRD = chunk([" b", "y", "!\n"], ["accepted", "accepted", "recovered"], TREE)
TEXT = "你好，🚀 go by!\n"
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def script(tail: dict[str, Any] | None = None) -> list[Step]:
    return [
        ROLE, b": comment\n\n", *torn(FIRST), *torn(SECOND), THIRD, END, tail or summary(9), DONE,
    ]  # fmt: skip


def test_the_text_is_what_was_streamed_and_shows_where_it_came_from(tab: Any, server: StandIn) -> None:
    server.will(*script())
    tab.locator("#prompt").fill("你好")
    run(tab)
    assert box(tab) == TEXT
    assert tokens(tab) == [
        ("你", "plain"), ("好，", "accepted"), ("🚀", "accepted"), (" go", "bonus"),
        (" b", "accepted"), ("y", "accepted"), ("!\n", "recovered"),
    ]  # fmt: skip
    look = (
        "s => ['background-color', 'text-decoration-line', 'text-decoration-style']"
        ".map(name => getComputedStyle(s).getPropertyValue(name))"
    )
    kinds = ("accepted", "recovered", "bonus", "plain")
    looks = {kind: tab.locator(f"#on .tok[data-kind={kind}]").first.evaluate(look) for kind in kinds}
    assert len({back for back, _, _ in looks.values()}) == len(looks)
    assert len({(line, style) for _, line, style in looks.values()}) == len(looks)  # also without colours
    legend = tab.locator(".legend .tok").evaluate_all("all => all.map(s => [s.textContent, s.dataset.kind])")
    assert sorted(kind for kind, _ in legend) == sorted(looks)
    assert all(text == kind for text, kind in legend)


def test_what_is_asked(tab: Any, server: StandIn) -> None:
    server.will(*script())
    tab.locator("#prompt").fill("Hi <b>")
    run(tab)
    path, body = server.asked[0]
    assert path == "v1/chat/completions"
    assert body == {
        "model": "tiny", "messages": [{"role": "user", "content": "Hi <b>"}], "temperature": 0, "max_tokens": 256,
        "stream": True, "stream_options": {"include_usage": True},
        "speculative": {"include_tokens": True, "include_metrics": True, "enabled": True},
    }  # fmt: skip
    server.will(*script())
    tab.locator("summary").click()
    for name, value in {"system": "Be brief.", "temperature": "0.7", "max_tokens": "9", "seed": "0"}.items():
        tab.locator(f"#{name}").fill(value)
    tab.locator("#k").select_option("0")
    tab.locator("#model").select_option("big")
    run(tab)
    _, body = server.asked[1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"], body["seed"], body["model"]) == (0.7, 9, 0, "big")
    assert body["speculative"]["num_speculative_tokens"] == 0
    assert tab.locator("#k option").all_text_contents() == ["auto", *map(str, range(17))]


def test_numbers_live_and_then_the_servers(tab: Any, server: StandIn) -> None:
    second, third, rest = threading.Event(), threading.Event(), threading.Event()
    server.will(FIRST, second, SECOND, third, THIRD, rest, summary(9, rate=0.4), DONE)
    tab.get_by_role("button", name="Run").click()
    shows(tab, "你")
    shown = numbers(tab)
    assert (shown["rate"], shown["length"], shown["k"], shown["tokens"]) == ("–", "–", "0", "1")
    assert re.fullmatch(r"\d+ ms", shown["ttft"])
    second.set()
    shows(tab, "go")
    shown = numbers(tab)
    assert (shown["rate"], shown["length"], shown["k"], shown["tokens"]) == ("100 %", "5.00", "4", "6")
    third.set()
    shows(tab, "!\n")
    shown = numbers(tab)
    assert (shown["rate"], shown["length"], shown["k"], shown["tokens"]) == (
        "46 %",
        "4.00",
        "3",
        "9",
    )  # 6 of 13, two drafts
    assert float(shown["tps"]) > 0
    rest.set()
    says(tab, "Done: 9 tokens.")
    assert numbers(tab) == {
        "rate": "40 %", "length": "3.25", "k": "3", "tps": "40.0", "ttft": "25 ms", "tokens": "9",
    }  # fmt: skip
    note = tab.locator("#on .note").text_content()
    assert note == "by position: 75 · 50 %; prompt 34 tokens, 12 cached"


CHAIN = [node(f" word{i}", i - 1, i < 12) for i in range(16)]
MANY = chunk([f" word{i}" for i in range(12)] + ["other"], ["accepted"] * 12 + ["recovered"], CHAIN)


def check_layout(tab: Any) -> None:
    """Every node lies inside the drawing and on no other."""
    frame = tab.locator("#drawing").bounding_box()
    boxes = [rect.bounding_box() for rect in tab.locator("#drawing rect").all()]
    for i, one in enumerate(boxes):
        assert one["x"] >= frame["x"]
        assert one["x"] + one["width"] <= frame["x"] + frame["width"]
        assert one["y"] >= frame["y"]
        assert one["y"] + one["height"] <= frame["y"] + frame["height"]
        for other in boxes[:i]:
            aside = one["x"] >= other["x"] + other["width"] or other["x"] >= one["x"] + one["width"]
            assert aside or abs(one["y"] - other["y"]) >= one["height"]


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize(("step", "own"), [(THIRD, "!↵"), (MANY, "other")], ids=["tree", "chain of 16"])
def test_the_draft_is_drawn(tab: Any, server: StandIn, step: dict[str, Any], own: str, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 800})
    server.will(step, summary(3), DONE)
    run(tab)
    draft = step["speculation"]["draft"]
    drawn = tab.locator("#drawing g").evaluate_all(
        "all => all.map(g => [g.querySelector('text').textContent, g.getAttribute('class')])"
    )
    expected = [[n["text"].replace(" ", "·"), "accepted" if n["accepted"] else "rejected"] for n in draft]
    assert drawn == [*expected, [own, "recovered"]]
    check_layout(tab)
    accepted = sum(n["accepted"] for n in draft)
    text = tab.locator("#caption").text_content()
    assert text == f"Step 1, drafter suffix: {len(draft)} drafted, {accepted} accepted; dashed: rejected."


def test_odd_drafts(tab: Any, server: StandIn) -> None:
    """Parents that are none and pieces without text; pieces that do not add up are not believed."""
    odd = chunk(["", "ok"], ["accepted", "bonus"], [node("", 0, True), node(LONG, 7)])
    wrong = chunk(["a", "b"], ["accepted", "bonus"], [node("a", -1, True)])
    wrong["choices"][0]["delta"]["content"] = "cut short"
    server.will(odd, wrong, summary(4), DONE)
    run(tab)
    assert tokens(tab) == [("ok", "bonus"), ("cut short", "plain")]
    server.will(odd, DONE)
    run(tab)
    labels = tab.locator("#drawing text").all_text_contents()
    assert labels == ["∅", LONG[:13] + "…", "ok"]
    check_layout(tab)


def test_comparison_of_equal_texts(tab: Any, server: StandIn) -> None:
    off = [chunk([piece], ["bonus"], []) for piece in ("你", "好，", "", "", "🚀", " go", " b", "y", "!\n")]
    server.will(*script(summary(9, tps=40.0, ttft=100.0)))
    server.will(*off, summary(9, tps=20.0, ttft=10.0, drafts=0), DONE)
    tab.get_by_label("Compare with speculation off").check()
    tab.locator("#seed").fill("3")
    run(tab)
    assert tab.locator("#verdict").text_content() == (
        "Same text, 12 characters. Speculation was 2.00 times as fast: "
        "40.0 against 20.0 tokens/s after the first token."
    )
    assert box(tab, "off") == box(tab) == TEXT
    assert {kind for _, kind in tokens(tab, "off")} == {"plain"}
    assert numbers(tab, "off") == {"tps": "20.0", "ttft": "10 ms", "tokens": "9"}
    assert server.events == ["began", "ended"] * 2  # never both at once
    (_, one), (_, other) = server.asked
    assert (one.pop("speculative")["enabled"], other.pop("speculative")["enabled"]) == (True, False)
    assert one == other
    on, off_box = tab.locator("#on").bounding_box(), tab.locator("#off").bounding_box()
    assert on["y"] == off_box["y"]
    assert on["x"] + on["width"] < off_box["x"]


def test_comparison_of_different_texts(tab: Any, server: StandIn) -> None:
    for tail in ("left\n", ""):
        server.will(chunk(["🚀 same ", tail], ["accepted", "bonus"], [node("x", -1, True)]), summary(2), DONE)
    tab.get_by_label("Compare with speculation off").check()
    tab.locator("#temperature").fill("1")
    run(tab)
    text = tab.locator("#verdict").text_content()
    start = "The text differs from character 8 on: “\u2068left↵\u2069” with speculation, the end without. Expected at"
    assert text.startswith(start)  # characters, not UTF-16's halves


def test_stop_ends_the_request(tab: Any, server: StandIn) -> None:
    server.will(FIRST, ending="endless")
    tab.get_by_label("Compare with speculation off").check()
    tab.get_by_role("button", name="Run").click()
    shows(tab, "你")
    assert tab.locator("#run").get_attribute("aria-disabled") == "true"
    tab.keyboard.press("Control+Enter")  # one at a time
    tab.get_by_role("button", name="Stop").click()
    says(tab, "Stopped after 1 token.")
    assert server.has_left.wait(30)
    assert len(server.asked) == 1
    assert tab.locator("#verdict").is_hidden()
    server.will(*script())
    tab.get_by_label("Compare with speculation off").uncheck()
    run(tab)
    assert box(tab) == TEXT


def test_keyboard_only(tab: Any, server: StandIn) -> None:
    reached = []
    for _ in range(16):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.className"))
        style = (
            "(({outlineStyle, outlineWidth}) => [outlineStyle, outlineWidth])(getComputedStyle(document.activeElement))"
        )
        assert tab.evaluate(style) == ["solid", "2px"] or reached[-1] == ""
        if reached[-1] == "prompt":
            tab.keyboard.press("Control+A")
            tab.keyboard.type("Hello")
    controls = ["prompt", "", "model", "temperature", "max_tokens", "seed", "k", "key", "compare", "run", "stop"]
    assert reached[: len(controls)] == controls  # "" is the summary
    assert reached[len(controls) :][:2] == ["drawing", "text"]
    tab.locator("#compare").focus()
    tab.keyboard.press("Space")
    tab.keyboard.press("Tab")
    server.will(FIRST, ending="endless")
    tab.keyboard.press("Enter")
    shows(tab, "你")
    assert tab.evaluate("document.activeElement.id") == "run"
    tab.keyboard.press("Escape")
    says(tab, "Stopped")
    assert server.has_left.wait(30)
    assert server.asked[0][1]["messages"] == [{"role": "user", "content": "Hello"}]
    server.will(*script())
    server.will(*script())
    tab.locator("#prompt").focus()
    tab.keyboard.press("Control+Enter")
    says(tab, "Done")
    assert tab.evaluate("document.activeElement.id") == "prompt"


def test_what_a_screen_reader_hears(tab: Any) -> None:
    assert tab.locator("#status").get_attribute("role") == "status"
    spoken = "[aria-live], [role=status], [role=alert], [role=log]"
    assert tab.evaluate(f"!document.querySelector('#on .text').closest('{spoken}')")  # not every token
    nameless = tab.evaluate(
        "[...document.querySelectorAll('input, textarea, select')].filter(e => !e.labels.length && !e.ariaLabel).length"
    )
    assert nameless == 0


def error(message: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "some_error", "code": code}}


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (Reply([error("9999 tokens;\n the limit is 512", None)], 400), "9999 tokens; the limit is 512 (400)"),
        (Reply([error("Give an API key.", "invalid_api_key")], 401), "Give an API key. (401, invalid_api_key)"),
        (Reply([error("8 requests wait.", "too_many")], 429), "8 requests wait. (429, too_many)"),
        (Reply([b"<h1>Bad Gateway</h1>"], 502), "The server answered 502 Bad Gateway."),
        (Reply([{"detail": "odd"}], 500), "The server answered 500 Internal Server Error."),
        (Reply([FIRST, error("Out of memory.", "oom")], ending="endless"), "Out of memory. (oom)"),
        (Reply([FIRST, THIRD]), "The stream ended early, after 4 tokens: the text may be incomplete."),
        (Reply([FIRST, 0.2], ending="cut"), "The connection broke after 1 token: network error"),
        (Reply([b"data: {oops\n\n"]), "What the server sent after 0 tokens is unreadable: "),
    ],
    ids=["400", "401", "429", "502", "500", "mid-stream", "no end", "cut", "no JSON"],
)  # fmt: skip
def test_errors_are_one_line(tab: Any, server: StandIn, reply: Reply, line: str) -> None:
    tab.on("dialog", lambda dialog: pytest.fail(dialog.message))
    server.replies.append(reply)
    run(tab, line)
    status = tab.locator("#status")
    assert "\n" not in status.text_content()
    assert status.get_attribute("class") == "wrong"
    assert status.text_content() == line or line.endswith(": ")
    assert tab.locator("#run").get_attribute("aria-disabled") == "false"
    if reply.ending == "endless":
        assert server.has_left.wait(30)  # the rest is not wanted
    server.will(*script())
    run(tab)
    assert box(tab) == TEXT
    assert status.get_attribute("class") == ""


def test_no_server_and_a_failed_comparison(tab: Any, server: StandIn) -> None:
    server.will(*script())
    server.will(error("Busy.", None), status=429)
    tab.get_by_label("Compare with speculation off").check()
    run(tab, "Speculation off: Busy. (429)")
    assert box(tab) == TEXT  # what came is not lost
    assert tab.locator("#verdict").is_hidden()
    tab.route("**/v1/**", lambda route: route.abort())
    run(tab, "No answer from the server: Failed to fetch")
    assert numbers(tab)["tokens"] == "–"


def test_models_that_come_late_or_not_at_all(tab: Any, server: StandIn) -> None:
    refusal = json.dumps(error("Give an API key.", "invalid_api_key"))
    tab.route("**/v1/models", lambda route: route.fulfill(status=401, body=refusal))
    tab.reload()
    says(tab, "Give an API key. (401, invalid_api_key)")
    tab.unroute("**/v1/models")
    held: list[Any] = []
    tab.route("**/v1/models", lambda route: held.append(route))
    tab.reload()
    server.will(FIRST, ending="endless")
    with tab.expect_request("**/v1/models"):
        tab.get_by_role("button", name="Run").click()
    held[1].continue_()
    shows(tab, "你")
    with tab.expect_response("**/v1/models"):
        held[0].continue_()
    tab.wait_for_timeout(100)
    assert tab.locator("#status").text_content() == "Running."  # not "Ready."
    tab.keyboard.press("Escape")
    says(tab, "Stopped")


def test_a_model_without_a_chat_template(tab: Any, server: StandIn) -> None:
    server.will(error("no chat template", "no_chat_template"), status=400)
    for _ in range(3):
        server.will(chunk([" 好", "🚀"], ["bonus"] * 2, [], "plain"), summary(2), DONE)
    tab.get_by_label("Compare with speculation off").check()
    tab.locator("#prompt").fill("Once")
    run(tab)
    assert box(tab) == box(tab, "off") == " 好🚀"
    tab.get_by_label("Compare with speculation off").uncheck()
    run(tab)
    paths = [path for path, _ in server.asked]
    assert paths == ["v1/chat/completions", "v1/completions", "v1/completions", "v1/completions"]  # asked for once
    assert server.asked[1][1]["prompt"] == "Once"
    assert "messages" not in server.asked[1][1]
    assert "no chat template" in tab.locator("#on .note").text_content()


def test_the_key_stays_in_the_tab(tab: Any, server: StandIn) -> None:
    assert server.keys == [None, None]
    tab.locator("#key").fill(" sk-secret ")
    tab.locator("#prompt").focus()
    tab.wait_for_function("() => sessionStorage.length === 1")
    says(tab, "Ready.")
    server.will(*script())
    run(tab)
    assert server.keys[-1] == "Bearer sk-secret"
    assert tab.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
    tab.reload()
    says(tab, "Ready.")
    assert tab.locator("#key").input_value() == "sk-secret"
    assert server.keys[-1] == "Bearer sk-secret"  # the models
    tab.locator("#key").fill("")
    server.will(*script())
    run(tab)
    assert server.keys[-1] is None


def test_a_phone(tab: Any, server: StandIn) -> None:
    tab.set_viewport_size({"width": 360, "height": 740})
    server.will(FIRST, MANY, chunk([LONG], ["recovered"], [node(LONG, -1), *TREE]), summary(5), DONE)
    server.will(error(LONG, "code"), status=400)
    tab.locator("summary").click()
    tab.get_by_label("Compare with speculation off").check()
    run(tab, LONG)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.locator("#on .text").evaluate("box => box.scrollWidth <= box.clientWidth")
    assert tab.locator("#status").evaluate("e => e.getBoundingClientRect().top") >= 0  # scrolled to what comes
    assert tab.locator("#on").evaluate("e => e.getBoundingClientRect().top < innerHeight")
    on, off = tab.locator("#on").bounding_box(), tab.locator("#off").bounding_box()
    assert on["y"] + on["height"] < off["y"]


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(tab: Any, server: StandIn, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    server.will(*script())
    run(tab)
    pairs = tab.evaluate(
        """() => [...document.querySelectorAll('body *')].flatMap(e => {
            const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
            if (!own || !e.checkVisibility() || e.closest('title')) return [];
            let back = e.closest('g')?.querySelector('rect') ?? e, paint = '';
            const isSvg = back !== e;
            if (isSvg) paint = getComputedStyle(back).fill;
            for (let at = e; !paint || paint === 'none' || paint === 'rgba(0, 0, 0, 0)'; at = at.parentElement)
                paint = getComputedStyle(at).backgroundColor;
            return [[e.outerHTML.slice(0, 80), isSvg ? getComputedStyle(e).fill : getComputedStyle(e).color, paint]];
        })"""
    )
    assert len(pairs) > 40
    for what, colour, back in pairs:
        light, dark = sorted([luminance(colour), luminance(back)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (what, colour, back)
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.1) == (scheme == "dark")


def test_text_stays_text(tab: Any, server: StandIn) -> None:
    step = chunk([XSS, XSS], ["accepted", "recovered"], [node(XSS, -1, True), node(XSS, 0)])
    server.will(step, summary(2), DONE)
    server.will(error(XSS, XSS), status=400)
    tab.get_by_label("Compare with speculation off").check()
    run(tab, XSS)
    assert box(tab) == XSS + XSS
    assert tab.evaluate("document.querySelectorAll('main img, main b').length") == 0
    assert tab.title() == "FlashSpec playground"


def test_right_to_left(tab: Any, server: StandIn) -> None:
    """Each line goes its own way, and space and line ends are kept."""
    server.will(chunk(["abc  d\n", "של", "ום"], ["accepted", "accepted", "bonus"], [node("x", -1, True)] * 2), DONE)
    run(tab)
    frame = tab.locator("#on .text").bounding_box()
    latin, start, end = (span.bounding_box() for span in tab.locator("#on .tok").all())
    assert latin["x"] - frame["x"] < 30
    assert frame["x"] + frame["width"] - start["x"] - start["width"] < 40  # begins at the right
    assert end["x"] < start["x"]


def test_the_file() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|localStorage|alert\(|eval\(|\son\w+=", text
    )
    assert re.findall(r"<link[^>]*>", text) == ['<link rel="icon" href="data:,">']  # no request for an icon
