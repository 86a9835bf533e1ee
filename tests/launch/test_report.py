"""The report as a reader meets it: whole, self-contained, of any run at any moment, and never fooled by what a policy wrote."""

import collections
import dataclasses
import functools
import html.parser
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import threading

import numpy as np
import pytest

from launch import report, run_directory
from launch.config import load_config
from launch.report_figures import Axis, number, percent, seconds, size
from launch.report_page import STYLE, node, page, table
from rl.ledger import Ledger, ScoredTrajectory
from rl.types import FinishReason, Trajectory

HOSTILE = b"<script>alert('x')</script><img src=http://evil.example/x.png>\x00\x1b[31m\xff &amp; \"'"
VOID = {"meta", "link", "br", "img", "input", "hr"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SUMMARY = {
    "success_before": 0.0, "success_after": 0.891, "sampled_success_before": 0.016, "sampled_success_after": 0.863,
    "sampling_tokens_per_second": 389.2, "replay_tokens_per_second": None, "training_tokens_per_second": 2750.0,
    "fraction_multi_version": 0.942, "staleness_mean": 1.53, "staleness_max": 4.0, "old_logprobs": "snapshot",
    "exactness_max_error": 0.0, "exactness_compared_tokens": 28553, "exactness": {"replay": "bitwise", "platform": "cpu"},
    "seconds": 90.4,
}  # fmt: skip


def trajectory(request_id: int, reward: float | None, *, first_version: int) -> Trajectory:
    """A prompt, and HOSTILE bytes that versions sampled in turn, eight each; in the first eight the environment speaks, too."""
    tokens = np.array([256, *b"Say <b>it</b>!\n", *HOSTILE], np.int32)
    versions = np.full(len(tokens), -1, np.int32)
    versions[-len(HOSTILE) :] = first_version + np.arange(len(HOSTILE)) // 8
    versions[2 - len(HOSTILE)] = -1
    return Trajectory(
        request_id=request_id, group_id=0, tokens=tokens, loss_mask=versions > first_version,
        sampler_logprobs=np.where(versions < 0, np.nan, -1.0).astype(np.float32), policy_versions=versions,
        context_versions=versions, turn_starts=np.zeros(0, np.int32), reward=reward, success=False,
        finish_reason=FinishReason.LENGTH,
    )  # fmt: skip


def make_run(run_dir: pathlib.Path, num_steps: int, *, ledger_steps: tuple[int, ...] = (),
             is_finished: bool = True) -> pathlib.Path:
    """A run directory as launch.train leaves it, without the training."""
    run_directory.create(dataclasses.replace(load_config("quickstart"), run_dir=run_dir), "tiny")
    metrics = [name for plots in report.PLOTS.values() for plot in plots for _, name in plot.lines if name != "dropped_groups"]
    counts = {"trajectories": 4, "dropped_stale": 0, "dropped_groups_stale": 1, "dropped_groups_timeout": 2}
    rows = [
        {"step": step, **{name: float(step + index) for index, name in enumerate(metrics)}, **counts, "version": step - 1,
         "tokens_trained": 10, "seconds_step": 0.5, **({"entropy": None} if step == 2 else {})}
        for step in range(1, num_steps + 1)
    ]  # fmt: skip
    write_rows(run_dir / "metrics.jsonl", rows)
    stages = ("sampler", "rollout", 0.0, 0.4), ("learner", "replay", 0.4, 0.6), ("learner", "train", 0.6, 0.9)
    spans = [{"step": step, "lane": lane, "stage": stage, "start": step + start, "stop": step + stop}
             for step in range(1, num_steps + 1) for lane, stage, start, stop in stages]  # fmt: skip
    write_rows(run_dir / "timeline.jsonl", spans)
    ledger = Ledger(run_dir / "ledger")
    for step in ledger_steps:
        trained = [trajectory(10 * step, 1.0, first_version=step), trajectory(10 * step + 1, None, first_version=step)]
        ledger.record_step(step, step + 9, "sampler", [ScoredTrajectory(it, {}) for it in trained], {})
    if is_finished:
        run_directory.write_json(run_dir / "summary.json", SUMMARY)
    return run_dir


def write_rows(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(html.parser.HTMLParser):
    """What a browser would see: elements that open and close properly, their attributes, the text of each."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.text: dict[str, list[str]] = collections.defaultdict(list)  # by tag
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes)
        self.elements.append((tag, dict(attributes)))
        self.text[tag].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in {*self.open}:
            self.text[tag][-1] += data

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def written(run_dir: pathlib.Path) -> Page:
    path = report.write_report(run_dir)
    assert path == run_dir / "report.html"
    return Page(path.read_text())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> pathlib.Path:
    return make_run(tmp_path_factory.mktemp("report") / "run", 30, ledger_steps=(1, 16, 30))


@pytest.fixture(scope="module")
def shown(run_dir) -> Page:
    return written(run_dir)


def test_the_page_is_well_formed_and_accessible(shown):
    assert shown.elements[0] == ("html", {"lang": "en"})
    assert shown.text["title"] == ["tiny, seed 0 · Exactor run report"]
    assert shown.text["h1"] == ["tiny, seed 0"]
    assert shown.text["h2"] == ["Learning", "Asynchrony", "Ratios", "Cost", "Timeline", "Transcripts"]
    assert [name for name, _ in shown.elements].index("h1") < [name for name, _ in shown.elements].index("h2")
    ids = shown.attributes("id")
    assert len(ids) == len(set(ids))
    drawings = [attributes for name, attributes in shown.elements if name == "svg" and "aria-hidden" not in attributes]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)
    assert len(drawings) == sum(map(len, report.PLOTS.values())) + 2


def test_the_page_needs_nothing_else(shown):
    assert shown.attributes("src") == []
    links = shown.attributes("href")
    assert set(links) - {"data:,"} == {f"#{anchor}" for anchor in shown.attributes("id")}
    assert not re.search(r"url\(|@import|https?:", "".join(shown.text["style"] + shown.text["script"]))
    policy = next(attributes["content"] for _, attributes in shown.elements if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")


def test_every_plot_is_there_with_its_last_values(run_dir, shown):
    titles = [plot.title for plots in report.PLOTS.values() for plot in plots]
    assert shown.text["h3"][: len(titles)] == [f"{title} step 30" for title in titles]
    row = run_directory.read_metrics(run_dir)[-1]
    for plot in (plot for plots in report.PLOTS.values() for plot in plots):
        for label, name in plot.lines:
            assert f"{label} {plot.text(row.get(name, 3), 3)}" in shown.text["li"]  # 3 groups are dropped
    description = next(text for text in shown.attributes("aria-label") if text.startswith("Entropy"))
    assert description == "Entropy, learner steps 1 to 30. entropy: first 3, last 32, lowest 3, highest 32."


def test_a_missing_value_is_a_gap_and_a_value_alone_is_a_dot(run_dir, shown):
    text = (run_dir / "report.html").read_text()
    figure = text[text.index("Entropy") :]
    figure = figure[: figure.index("</figure>")]
    line, dots = re.findall(r'<path d="([^"]*)" class="(?:line|dots)">', figure)[-2:]
    assert dots.startswith("M0 ") and dots.endswith("h0")
    assert line.count("M") == 1 and len(re.findall(r"\d+ \d+", line)) == 28
    assert "3|none|5|" in figure


def test_the_header_tells_which_run_it_was(run_dir, shown):
    text = shown.text["header"][0]
    content = json.loads((run_dir / "config.json").read_text())
    for words in ("Finished: 30 of 64 learner steps.", content["commit"] or "unknown", "jax", "89.1%", "94.2%", "bitwise (cpu)",
                  "1.53, 4 versions", "0.0e+00 nats, 28,553 tokens", '"max_staleness": 4'):
        assert words in text


def test_what_a_policy_wrote_is_text_and_all_of_it_is_visible(run_dir, shown):
    names = [name for name, _ in shown.elements]
    assert names.count("script") == 1 and "img" not in names and "b" not in names
    article = shown.text["article"][0]
    assert "<bos>Say <b>it</b>!\\n\n" in article
    printed = HOSTILE.replace(b"\x00\x1b", b"\\x00\\x1b").replace(b"\xff", b"\\xff").decode()
    assert re.sub(r"v\d+", "", article).endswith(printed)
    raw = (run_dir / "report.html").read_bytes()
    assert b"\x00" not in raw and b"\x1b" not in raw and b"<script>alert" not in raw


def test_a_reader_sees_where_a_publish_interrupted(shown):
    assert [title for title in shown.text["h3"] if title.startswith("Step")] == [
        "Step 1, reward 1", "Step 1, reward none", "Step 16, reward 1", "Step 16, reward none", "Step 30, reward 1",
        "Step 30, reward none",
    ]  # fmt: skip
    article = shown.text["article"][2]
    assert "trained at version 15" in article  # the learner's version of the metrics' row
    for version in range(16, 16 + (len(HOSTILE) + 7) // 8):
        assert article.count(f"v{version}") == 1
    passages = [attributes["class"] for name, attributes in shown.elements if attributes.get("class", "").startswith("policy")]
    assert passages[:3] == ["policy s1 untrained", "policy s1 untrained", "policy s2"]


def test_a_run_that_goes_on_has_a_report_too(tmp_path):
    run_dir = make_run(tmp_path / "run", 3, is_finished=False)
    (run_dir / "timeline.jsonl").unlink()
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rewa')  # being written just now
    text = " ".join(written(run_dir).text["body"])
    assert "still under way: 3 of 64 learner steps" in text
    assert "ring replay against live scores" in text
    assert "has no timeline.jsonl" in text
    assert "holds no trajectories" in text


def test_one_step_is_enough(tmp_path):
    shown = written(make_run(tmp_path / "run", 1, ledger_steps=(1,)))
    assert shown.text["article"][0].startswith("Step 1, reward 1")
    dots = [attributes["d"] for _, attributes in shown.elements if attributes.get("class") == "dots"]
    assert dots and all(path.startswith("M500 ") and path.endswith("h0") for path in dots)


def test_a_long_run_has_a_small_report(tmp_path):
    run_dir = make_run(tmp_path / "run", 10_000)
    written(run_dir)
    assert (run_dir / "report.html").stat().st_size < 1_000_000


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    run_dir = make_run(tmp_path / "run", 0)
    assert report.main([str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "metrics.jsonl holds no learner step" in error
    assert not (run_dir / "report.html").exists()


def test_a_summary_of_another_version_is_refused_by_name(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 1)
    run_directory.write_json(run_dir / "summary.json", {name: value for name, value in SUMMARY.items() if name != "seconds"})
    assert report.main([str(run_dir)]) == 2
    assert "'seconds'" in capsys.readouterr().err


def test_the_command_prints_where_the_report_is(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 2)
    assert report.main([str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'report.html'}\n"


def test_help_works(capsys):
    with pytest.raises(SystemExit) as exit_info:
        report.main(["--help"])
    assert exit_info.value.code == 0
    assert "python -m launch.report RUN_DIR" in capsys.readouterr().out


# --- parts ---


def test_elements_escape_what_they_hold():
    paragraph = node("p", "a < b & c", node("b", "x"), " tail", "s", None, class_="k", data_x='"<', id=None)
    shown = Page(page("<t>", paragraph, table("c", [("h", "<i>")])))
    assert shown.text["title"] == ["<t>"] and shown.text["p"] == ["a < b & cx tails"] and shown.text["td"] == ["<i>"]
    assert ("p", {"class": "k", "data-x": '"<'}) in shown.elements


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        (number, 0.0, "0"), (number, 0.8127, "0.813"), (number, 12.0, "12"), (number, 1536.0, "1,536"),
        (number, -0.00171, "-0.00171"), (number, 4.12e-9, "4.12e-9"), (number, 1e-7, "1e-7"), (number, 2.5e8, "2.5e8"),
        (percent, 0.0282, "2.82%"), (percent, 1.0, "100%"), (size, 3565568.0, "3.57 MB"), (size, 0.0, "0 B"),
        (seconds, 0.0938, "93.8 ms"), (seconds, 28.02, "28 s"),
    ],
)  # fmt: skip
def test_values_are_written_for_people(text, value, expected):
    assert text(value) == expected


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis.linear([0.0, 0.98], from_zero=True), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis.linear([0.9991, 0.9999], from_zero=False), ["0.999", "0.9992", "0.9994", "0.9996", "0.9998", "1"]),
        (Axis.linear([], from_zero=False), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis.linear([-3.0, -3.0], from_zero=False), ["-5", "-4", "-3", "-2", "-1"]),
        (Axis.logarithmic([2e-7, 5e-6]), ["1e-7", "1e-6", "1e-5"]),
        (Axis.logarithmic([1.0]), ["0.1", "1"]),
        (Axis.logarithmic([1e-12, 0.0, 28.0]), ["0.001", "0.01", "0.1", "1", "10", "100"]),
        (Axis.logarithmic([0.0]), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis.between(1, 64, smallest_step=1), ["20", "40", "60"]),
        (Axis.between(1, 3, smallest_step=1), ["1", "2", "3"]),
        (Axis.between(7, 7, smallest_step=1), ["7"]),
        (Axis.between(126.21, 126.64), ["126.3", "126.4", "126.5", "126.6"]),
    ],
)  # fmt: skip
def test_axes_have_few_round_labels_that_differ(axis, labels):
    assert [label for _, label in axis.labels(number)] == labels
    assert all(0 <= place <= 1 + 1e-9 for place, _ in axis.labels(number))


def test_a_logarithmic_axis_holds_what_is_too_small_at_its_foot():
    axis = Axis.logarithmic([0.0, 0.01, 1.0])
    assert [axis.place(value) for value in (0.0, 0.01, 0.1, 1.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0])


def test_colours_stand_out_from_the_page_in_both_modes():
    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (0, 2, 4)]
        return np.dot([0.2126, 0.7152, 0.0722], [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels])

    modes = [dict(re.findall(r"--(\w+): #(\w{6})", block)) for block in STYLE.split("@media")]
    assert len(modes) == 2
    for colours in modes:
        for name in ("ink", "muted", *(f"c{index}" for index in range(6))):
            low, high = sorted((luminance(colours["page"]), luminance(colours[name])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, name


# --- in a browser ---

WRAPPER = """<!DOCTYPE html><html><head><link rel="icon" href="data:,"></head><body>
<iframe src="report.html" width="{width}" height="900" onload="
  const root = this.contentDocument.documentElement, frame = this.contentDocument.querySelector('.frame');
  const box = frame.getBoundingClientRect();
  frame.dispatchEvent(new PointerEvent('pointermove', {{clientX: box.left}}));
  document.body.dataset.widths = root.scrollWidth + ' ' + root.clientWidth;
  document.body.dataset.step = this.contentDocument.querySelector('.at').textContent;
"></iframe></body></html>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_opens_it_without_complaint(run_dir, width):
    written(run_dir)
    (run_dir / "wrapper.html").write_text(WRAPPER.format(width=width))
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            requests.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=run_dir)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = subprocess.run(
                [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                 "--window-size=1400,1000", f"--user-data-dir={run_dir / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
                 f"http://127.0.0.1:{server.server_port}/wrapper.html"],
                capture_output=True, text=True, check=True, timeout=120,
            )  # fmt: skip
        finally:
            server.shutdown()
            thread.join()
    assert "CONSOLE" not in done.stderr
    assert sorted(requests) == ["/report.html", "/wrapper.html"]
    scrolled, visible = map(int, re.search(r'data-widths="(\d+) (\d+)"', done.stdout).groups())
    assert scrolled == visible <= width
    assert 'data-step="step 1"' in done.stdout
