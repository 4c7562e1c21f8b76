"""The main job as a newcomer runs it, on the shipped base. Minutes, so marked slow."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from onetake.metrics import Log


@pytest.mark.slow
def test_quick_preset_takes_less_than_90_seconds(tmp_path):
    start = time.monotonic()
    command = [sys.executable, "-m", "onetake", "train", "--quick", "--set", f"out={tmp_path}/run"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 90
    assert re.search(r"success +0\.\d{3} ± 0\.\d{3} → 0\.\d{3}", result.stdout)
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["shapes", "shapes-full"])
def test_held_out_success_rises(tmp_path, recipe):
    command = [sys.executable, "-m", "onetake", "train", recipe, "--set", f"out={tmp_path}/run"]
    subprocess.run(command, check=True)
    evaluations = [line for line in Log(tmp_path / "run" / "metrics.jsonl").read() if line["kind"] == "evaluation"]
    assert evaluations[-1]["n"] >= 200
    assert evaluations[-1]["success_rate"] - evaluations[0]["success_rate"] >= 0.15
