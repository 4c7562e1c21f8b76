"""A reward on a real HTTP server: the same scores, asked for while sampling goes on, and every failure named."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from onetake.core.records import Prompt
from onetake.metrics import Log
from onetake.rewards import http, load_rewards
from onetake.run import config
from onetake.run.session import opened
from onetake.run.train import Watcher, train
from tiny import tiny_recipe_file


class Server:
    """Answers every request with `answer(body)`: (status, text)."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], tuple[int, str]] = brightness
        self.bodies: list[dict[str, Any]] = []
        self.asked = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.asked.set()
                status, text = outer.answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"


def pixels(picture: str | list[str]) -> np.ndarray:
    if isinstance(picture, list):
        return np.stack([pixels(frame) for frame in picture])
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))))


def brightness(body: dict[str, Any]) -> tuple[int, str]:
    return 200, json.dumps({"scores": [float(pixels(picture).mean()) for picture in body["images"]]})


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http, "PAUSES", (0.0, 0.0))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 6, 3, 4, 5)])
def test_pictures_and_clips_arrive_as_they_are(server, shape):
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    prompts = [Prompt("one"), Prompt("two", metadata={"colour": "red"})]
    found = load_rewards(server.url)(images, prompts)[server.url]
    exact = (images * 255).round().byte()
    assert torch.allclose(found, exact.double().flatten(1).mean(1))
    (body,) = server.bodies
    assert (body["prompts"], body["metadata"]) == (["one", "two"], [{}, {"colour": "red"}])
    assert (np.stack([pixels(p) for p in body["images"]]) == exact.movedim(-3, -1).numpy()).all()


def test_asked_ahead_it_works_while_we_do_and_is_asked_once(server):
    rewards, images, go_on = load_rewards(server.url), torch.rand(1, 3, 4, 4), threading.Event()
    rewards(torch.rand(1, 3, 4, 4), [Prompt("first")])
    server.asked.clear()
    server.answer = lambda body: (go_on.wait(20), brightness(body))[1]
    rewards.ahead(images, [Prompt("one")])
    assert server.asked.wait(20)  # on its way, and we are here
    go_on.set()
    assert rewards(images, [Prompt("one")])[server.url].shape == (1,)
    assert [body["prompts"] for body in server.bodies] == [["first"], ["one"]]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((500, "out of memory"), r"/score answered 500 .*: b'out of memory'"),
        ((200, "0.5"), r"/score answered b'0\.5'; expected"),
        ((200, '{"scores": ["high"]}'), "expected"),
        ((200, '{"scores": [1, 2]}'), r"returned shape \(2,\) for 1 images"),
        ((200, '{"scores": [NaN]}'), "returned nan for image 0 of prompt 'one'"),
    ],
)
def test_answers_that_are_no_scores_are_refused(server, answer, told):
    server.answer = lambda body: answer
    with pytest.raises(ValueError, match=told):
        load_rewards(server.url)(torch.rand(1, 3, 4, 4), [Prompt("one")])
    assert len(server.bodies) == 1  # only a server that cannot be reached is tried again


def test_a_server_that_cannot_be_reached_is_named():
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/score cannot be reached .* tried 3 times"):
        load_rewards("http://127.0.0.1:9/score")(torch.rand(1, 3, 4, 4), [Prompt("one")])


def test_a_run_asks_once_for_every_micro_batch(server, tmp_path):
    tiny_recipe_file(tmp_path)
    changes = [f"task.reward={server.url}", f"out={tmp_path / 'run'}", "updates=1", "evaluation.prompts=1"]
    session = opened(str(tmp_path / "recipe.yaml"), changes)
    train(session.recipe, session.folder, config.dump(session.recipe), Watcher(say=lambda text: None))
    assert len(server.bodies) == 2 + 2  # two groups, and an evaluation of one prompt before and after
    (update,) = [line for line in Log(session.folder / "metrics.jsonl").read() if line["kind"] == "update"]
    rollout = [json.loads(brightness(body)[1])["scores"] for body in server.bodies[1:3]]
    assert update["rewards"][server.url] == pytest.approx(np.mean(rollout))
