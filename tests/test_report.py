"""The report: its numbers are the run's, its page stands alone, and a browser draws it."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onetake.metrics import METRICS, PHASES, Log
from onetake.report import write
from onetake.report.charts import Axis, Curve, chart
from onetake.report.costs import execution_sentence
from onetake.report.pictures import data_uri, subset
from onetake.report.run import load
from onetake.tasks.shapes.captions import prompts
from run_folders import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run under retain; tests only read it."""
    return make_run(tmp_path_factory.mktemp("runs") / "a run & more")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write([run], run.parent / "report.html").read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """The page's visible words: without tags and style, spaces made plain."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def lines(run: Path, kind: str) -> list[dict]:
    return [line for line in Log(run / "metrics.jsonl").read() if line["kind"] == kind]


def test_headline_holds_the_first_and_the_last_evaluation(run: Path, page: str):
    words = text_of(page)
    first, *_, last = lines(run, "evaluation")
    for line in (first, last):
        assert f"{100 * line['success_rate']:.1f} % ± {100 * line['stderr']:.1f}" in words
        assert f"{line['score_mean']:.3f}" in words
        assert f"{line['diversity']:.3f}" in words
    assert f"{100 * (last['success_rate'] - first['success_rate']):+.1f} points" in words
    assert "after 0 → 40 updates, 60 images each" in words
    assert "forwards 30 720" in words


def test_page_stands_alone(page: str):
    for value in re.findall(r'(?:src|href|action|data)="([^"]*)"', page):
        assert value.startswith(("data:image/png;base64,", "#")), value
    for value in re.findall(r"url\(([^)]*)\)", page):
        assert value.startswith("#"), value
    assert not re.search(r"<(script|link|iframe|object|embed)\b|@import|http", page)


def test_every_reference_inside_the_svgs_has_one_target(page: str):
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([\w-]+)', page)) <= set(ids)


def test_charts_take_their_colours_from_the_style_sheet(page: str):
    svgs = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert page.count("<svg") == 12
    assert "#0a0b" not in svgs
    assert not re.search(r"(?:fill|stroke): #", svgs)
    used = set(re.findall(r"var\(--([\w]+)\)", page))
    assert used <= set(re.findall(r"--(\w+):", page))


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [1.0, 1.0 + 1e-9], [0.0012, 0.0019], [1e-5, 3.0], [12e3, 4e6], [math.nan, 2.0]]
)
def test_ticks_can_be_told_apart(values: list[float]):
    curve = Curve(x=[1, 2], y=values, colour="run1", band=([0.9 * v for v in values], values))
    svg = chart([curve], Axis(name="a", log=True), "a")
    labels = re.findall(r"text-anchor: end[^>]*>\s*([^<]*)<", svg)[1:]  # the first is the label of the x-axis
    assert len(labels) == len(set(labels))
    assert len(labels) >= 2


def test_pictures_are_the_runs_and_every_verdict_is_told(run: Path, page: str):
    for update in (0, 40):
        stem = run / "evaluations" / f"update-{update:06d}"
        records = json.loads(stem.with_suffix(".json").read_text())
        images = np.load(stem.with_suffix(".npz"))["images"]
        for row in subset([(record["prompt"], record["sample"]) for record in records]):
            record, label = records[row], "before" if update == 0 else "after"
            pattern = rf'src="data:image/png;base64,([^"]+)" alt="{label}: {record["prompt"]}".*?</figure>'
            figure = re.search(pattern, page, flags=re.DOTALL)
            assert figure, record
            shown = Image.open(io.BytesIO(base64.b64decode(figure.group(1))))
            np.testing.assert_array_equal(np.asarray(shown), images[row])
            failed = [name for name, held in record["verdict"].items() if not held]
            assert f"{'✗' if failed else '✓'} {record['score']:.2f}" in figure.group(0)
            assert re.findall(r"<li>(.*?)</li>", figure.group(0)) == failed


def test_subset_is_the_first_sample_of_evenly_spaced_prompts():
    rows = [(f"prompt {i}", sample) for i in range(24) for sample in range(3)]
    assert subset(rows) == [6 * i for i in range(12)]
    assert subset(rows[:9]) == [0, 3, 6]
    assert subset([]) == []


def test_the_page_says_how_pictures_were_chosen(page: str):
    assert (
        "The first sample of 12 of the 30 held-out prompts, evenly spaced through the list; none is picked"
        in text_of(page)
    )


def test_texts_of_the_run_are_escaped(tmp_path: Path):
    folder = make_run(tmp_path / "<i>run</i>", updates=2, evaluate_every=2)
    for file in (folder / "evaluations").glob("*.json"):
        records = json.loads(file.read_text())
        for record in records:
            record["prompt"] += ' <script>"&'
            record["verdict"] = {'<b>"one"': False}
        file.write_text(json.dumps(records))
    page = write([folder], tmp_path).read_text()
    assert "<script" not in page
    assert "<i>run" not in page
    assert '<b>"one"' not in page
    assert escape('a red circle above a red square <script>"&') in page
    assert "x86 &lt;two cores&gt;" in page


def test_phases_add_up(run: Path, page: str):
    words = text_of(page)
    updates = lines(run, "update")
    sampling = sum(line["sampling_s"] for line in updates)
    everything = sum(line[f"{name}_s"] for line in updates for name in PHASES)
    assert (
        f"total {sampling:.1f} s" in words or f"total {round(sampling) // 60} min {round(sampling) % 60:02d} s" in words
    )
    assert f"{100 * sampling / everything:.1f} %" in words
    shares = [float(value) for value in re.findall(r"flex-grow:([\d.]+)", page)]
    assert len(shares) == len(PHASES)
    assert sum(shares) == pytest.approx(1, abs=1e-4)


def test_forwards_saved_are_exact(page: str):
    assert "30 720 + 7 680 = 38 400. Saved: 7 680 forwards, 20.0 % of native's" in text_of(page)


def test_recompute_saves_nothing(tmp_path: Path):
    words = sentence(make_run(tmp_path / "r", updates=2, execution="recompute", saved=0))
    assert words.endswith("training spent 1 536 forwards. Each trained event ran once more, so nothing was saved.")


def test_mixed_executions_are_counted(tmp_path: Path):
    folder = make_run(tmp_path / "r", updates=3, saved=96)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"retain"', '"recompute"', 1))
    words = sentence(folder)
    assert "recompute in 1 update and retain in 2 updates: training spent 2 304 forwards." in words
    assert "Saved: 288 forwards" in words


def sentence(folder: Path) -> str:
    return text_of(execution_sentence(load([folder])[0]))


def test_recipe_environment_and_glossary_are_there(run: Path, page: str):
    assert escape((run / "config.yaml").read_text()) in page
    assert "2.13.0" in page
    for key in lines(run, "update")[0]:
        assert f"<dt><code>{key}</code></dt>" in page
    assert "<code>task.success_at</code>" in page
    assert set(re.findall(r"<dt><code>(\w+)</code></dt>", page)) <= set(METRICS)


def test_equal_runs_give_equal_bytes(run: Path, page: str, tmp_path: Path):
    assert write([run], tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_comparison_overlays_runs_and_names_their_differences(run: Path, tmp_path: Path):
    other = make_run(tmp_path / "other", updates=30, execution="recompute", gain=0.3)
    page = write([run, other], tmp_path / "new" / "folder").read_text()
    words = text_of(page)
    assert "2 runs" in words
    assert "Where the recipes differ" in words
    assert "<th><code>execution</code></th><td>retain</td><td>recompute</td>" in page
    assert "<code>rollout.groups</code>" not in page
    for folder in (run, other):
        first, *_, last = lines(folder, "evaluation")
        assert f"{100 * first['success_rate']:.1f} % → {100 * last['success_rate']:.1f} %" in words
    assert page.count("<svg") == 12
    assert page.count("stroke: var(--run2)") >= 6
    assert len(re.findall("<img ", page)) == 12 * 3  # one picture before, because both start alike


def test_runs_of_one_name_are_told_apart_and_different_starts_are_said(tmp_path: Path):
    folders = [make_run(tmp_path / name / "run", updates=1, evaluate_every=1) for name in ("a", "b")]
    stem = folders[1] / "evaluations" / "update-000000.npz"
    images = np.load(stem)["images"]
    np.savez(stem, images=255 - images, scores=np.zeros(len(images)))
    page = write(folders, tmp_path).read_text()
    assert "a/run" in page
    assert "b/run" in page
    assert len(re.findall("<img ", page)) == 12 * 4
    assert "the runs start from different noise or another base" in text_of(page)


def test_runs_with_other_prompts_are_not_put_side_by_side(run: Path, tmp_path: Path):
    other = make_run(tmp_path / "other", updates=1, evaluate_every=1, texts=prompts("single", "held_out"))
    page = write([run, other], tmp_path).read_text()
    assert "The runs were evaluated on different prompts" in page
    assert "<img" not in page


def test_one_update_and_no_evaluation(tmp_path: Path):
    page = write([make_run(tmp_path / "r", updates=1, evaluate_every=0)], tmp_path).read_text()
    assert "On training prompts, update 1; this run holds no held-out evaluation" in page
    assert "<img" not in page
    assert page.count("<svg") == 12


def test_an_evaluation_and_no_update(tmp_path: Path):
    page = write([make_run(tmp_path / "r", updates=0)], tmp_path).read_text()
    assert "On held-out prompts, after 0 updates, 60 images" in page
    assert "Before training" in page
    assert "Numerics" not in page
    assert len(re.findall("<img ", page)) == 12


def test_a_task_without_success_or_constraints(tmp_path: Path):
    folder = make_run(tmp_path / "r", updates=2, evaluate_every=1, success=False)
    for file in (folder / "evaluations").glob("*.json"):
        records = [record | {"verdict": {}} for record in json.loads(file.read_text())]
        file.write_text(json.dumps(records))
    (folder / "environment.json").unlink()
    page = write([folder], tmp_path).read_text()
    assert "<h3>Success" not in page
    assert "✗ " not in text_of(page)
    assert page.count("<svg") == 9
    assert "no environment.json" in page


def test_numbers_that_are_not_finite_are_named(tmp_path: Path):
    folder = make_run(tmp_path / "r", updates=3)
    path = folder / "metrics.jsonl"
    path.write_text(re.sub(r'"grad_norm": [\d.e-]+', '"grad_norm": NaN', path.read_text(), count=1))
    assert "1 update had a gradient norm that is not finite" in write([folder], tmp_path).read_text()


def test_large_images_are_scaled_down():
    encoded = data_uri(np.zeros((1024, 512, 3), np.uint8)).partition(",")[2]
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (160, 320)


def test_videos_are_animated():
    frames = np.stack([np.full((16, 24, 3), shade, np.uint8) for shade in (10, 120, 240)])
    kind, _, encoded = data_uri(frames).partition(",")
    video = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert kind == "data:image/webp;base64"
    assert (video.n_frames, video.size) == (3, (24, 16))


def test_several_rewards_have_a_curve_each(tmp_path: Path):
    folder = make_run(tmp_path / "r", updates=6, evaluate_every=3)
    path, lines = folder / "metrics.jsonl", []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        lines.append(json.dumps(line | {"rewards": {"objects": 0.9, "left <of>": 0.1 * line["update"]}}))
    assert "mean, before its weight" not in write([folder], tmp_path / "one.html").read_text()
    path.write_text("\n".join(lines) + "\n")
    page = write([folder], tmp_path / "several.html").read_text()
    assert page.count("mean, before its weight") == 2 * 3  # against updates, wall-clock and forwards
    assert "left &lt;of&gt;" in page
    assert "left <of>" not in page


def test_folders_that_are_no_runs_are_refused(tmp_path: Path):
    empty, half, begun = tmp_path / "empty", tmp_path / "half", tmp_path / "begun"
    for folder in (empty, half, begun):
        folder.mkdir()
    (half / "config.yaml").write_text("seed: 0\n")
    (begun / "config.yaml").write_text("seed: 0\n")
    (begun / "metrics.jsonl").write_text('{"kind": "upd')
    cases = {
        tmp_path / "nowhere": "nowhere is not a run: there is no such folder",
        empty: "empty is not a run: it has no config.yaml and no metrics.jsonl",
        half: "half is not a run: it has no metrics.jsonl",
        begun: "begun: metrics.jsonl holds no complete line yet",
    }
    for folder, message in cases.items():
        with pytest.raises(ValueError, match=message):
            write([folder], tmp_path)
    with pytest.raises(ValueError, match="at least one run folder"):
        write([], tmp_path)


def test_contradicting_evaluations_are_refused(tmp_path: Path):
    folder = make_run(tmp_path / "r", updates=1, evaluate_every=1)
    file = folder / "evaluations" / "update-000001.json"
    records = json.loads(file.read_text())
    file.write_text(json.dumps(records[::-1]))
    with pytest.raises(ValueError, match="update 0 and update 1 list different prompts"):
        write([folder], tmp_path)
    file.write_text(json.dumps(records[1:]))
    with pytest.raises(ValueError, match=r"holds 60 images, but update-000001\.json describes 59"):
        write([folder], tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_a_browser_draws_the_page(run: Path, page: str, tmp_path: Path):
    report = tmp_path / "report.html"
    report.write_text(page, encoding="utf-8")
    picture = tmp_path / "page.png"
    dom = browse(tmp_path, "--dump-dom", f"--screenshot={picture}", "--window-size=1200,2400", report.as_uri())
    image = Image.open(picture).convert("RGB")
    assert image.size == (1200, 2400)
    assert len(image.getcolors(maxcolors=1 << 24)) > 200
    assert all(band.std() > 5 for band in np.array_split(np.asarray(image), 6))  # no blank stretch from top to bottom
    assert f"<h1>{escape(run.name)}</h1>" in dom
    assert "On held-out prompts" in dom


def browse(folder: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    switches = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'browser'}",
    )
    result = subprocess.run([CHROMIUM, *switches, *arguments], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout
