"""Functions that run in several processes: toy updates and tiny runs, on gloo."""

from __future__ import annotations

import io
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import PROMPTS, move
from onetake.core.advantages import Advantages
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo, Kl
from onetake.core.records import Address
from onetake.core.selection import All, Fraction
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS, Recompute
from onetake.metrics import Log
from onetake.parallel import ParallelConfig, World, world
from onetake.parallel.shard import DTensor, held
from onetake.policies import leaves, trainable
from onetake.policies.toy import ToyPolicy
from onetake.rewards import Rewards
from onetake.rollout.evaluation import EvaluationConfig, evaluate
from onetake.rollout.sampling import RolloutConfig, deal, sample, score
from onetake.tasks import Task

torch.multiprocessing.set_forkserver_preload(
    ["ranks", "onetake.run.session"]
)  # imported once for all ranks of all tests


def on_ranks(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(world, *arguments)`` returned in each of `size` new processes."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = torch.multiprocessing.start_processes
    start(_one_rank, (size, port, folder, function, arguments), nprocs=size, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _one_rank(rank: int, size: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    with world() as ranks:
        torch.save(function(ranks, *arguments), folder / f"{rank}.pt")


def on_agent(size: int, restarts: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(*arguments)`` returned in each of `size` processes, all started again when one dies: torchrun, without its
    command line, whose processes would import everything anew.
    """
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    returned = elastic_launch(agent, function)(*arguments)
    return [returned[rank] for rank in range(size)]


class Collectives(TorchDispatchMode):
    """Counts what torch.distributed sends: (operation, bytes of this rank's tensors), in order."""

    LOCAL = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ not in self.LOCAL:
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.seen.append((func.overloadpacket.__name__, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


VARIANTS = {
    "plain": {},
    "rectified, events of each sample, KL": {
        "objective": Grpo(event_weights="rectified"),
        "selection": Fraction(fraction=0.6),
        "kl": Kl(beta=0.3),
    },
    "KL as reward, global std": {"kl": Kl(beta=0.3, as_reward=True), "advantages": Advantages(std="global")},
}
TOY_REWARDS = Rewards(
    functions={
        "length": lambda x, prompts: x.norm(dim=1),
        "sign": lambda x, prompts: (x[:, 0] > 0).double(),
    },
    weights={"length": 1.0, "sign": 0.5},
)


def toy_update(ranks: World, execution: str, variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """One update of the toy policy, then the gradient of a second one on the same rollout, as the training loop makes them."""
    chosen = VARIANTS[variant]
    objective, kl = chosen.get("objective", Grpo(scale="exact", clip_low=0.1, clip_high=0.1)), chosen.get("kl")
    policy, config, strategy = ToyPolicy(Flow()), RolloutConfig(**sizes), EXECUTIONS[execution](kl)
    move(policy, 0.1)
    address = Address(seed=1, stream="train", update=0)
    dealt = deal(config, PROMPTS, policy, chosen.get("selection", All()), objective, address)
    rollout = sample(policy, strategy, config.over(ranks.size).share(dealt, ranks.rank), dealt)
    with Collectives() as scoring:
        score(rollout, TOY_REWARDS, chosen.get("advantages", Advantages()), kl, ranks)
    found = {
        "made": {
            (b.group, s): (outputs[i], [event.action[i] for event in events])
            for b, outputs, events in zip(rollout.batches, rollout.outputs, rollout.transitions, strict=True)
            for i, s in enumerate(b.samples)
        },
        "scores": rollout.scores,
        "rewards": rollout.rewards,
        "advantages": rollout.advantages,
        "scoring": scoring.seen,
        "kl": 0.0 if rollout.kl is None else float(rollout.kl.mean()),
    }
    with Collectives() as sent:
        strategy.accumulate(policy, rollout, Coefficients(objective, rollout))
        found["own"] = {name: p.grad.clone() for name, p in trainable(policy).items()}
        ranks.sum_gradients(policy.module.parameters(), policy.module.parameters())
    found |= {"sent": sent.seen, "gradient": {name: p.grad.clone() for name, p in trainable(policy).items()}}

    policy.module.zero_grad(set_to_none=True)
    move(policy)
    policy.version += 1
    coefficients = Coefficients(objective, rollout)
    Recompute(kl).accumulate(policy, rollout, coefficients)
    ranks.sum_gradients(policy.module.parameters(), policy.module.parameters())
    coefficients.share(ranks.rows)
    found |= {
        "second": {name: p.grad for name, p in trainable(policy).items()},
        "statistics": coefficients.statistics(),
    }
    return found


def toy_updates(ranks: World, cases: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [toy_update(ranks, *case) for case in cases]


def toy_session(ranks: World, cases: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """Everything that needs no pipeline, in one start of the processes."""
    return {
        "updates": toy_updates(ranks, cases),
        "missing": missing_gradients(ranks),
        "table": ranks.table(torch.tensor([[0.0, float("nan")], [float("nan"), 1.0]])),
        "unequal": unequal_weights(ranks),
        "failed": rank_0_fails(ranks),
        "evaluation": toy_evaluation(ranks),
    }


def toy_evaluation(ranks: World) -> dict[str, Any]:
    """Three prompts' samples and scores, and what this rank did for them."""
    scored: list[str] = []

    def length(x, prompts):
        scored.extend(prompts)
        return x.norm(dim=1)

    policy, rewards = ToyPolicy(Flow()), Rewards(functions={"length": length}, weights={"length": 1.0})
    calls = []
    policy.module.register_forward_hook(lambda *_: calls.append(1))
    task = Task(train=PROMPTS, held_out=PROMPTS[:3], rewards=rewards)
    made = evaluate(policy, task, EvaluationConfig(samples=2), seed=1, world=ranks)
    return {"made": made, "scored": scored, "calls": len(calls), "billed": policy.calls}


def assert_same_evaluation(found: Path, wanted: Path, update: int) -> None:
    """Of two run folders: every number of the log but seconds, every picture, score and verdict, bit for bit."""
    lines = []
    for folder in (found, wanted):
        every = [line for line in Log(folder / "metrics.jsonl").read() if line["kind"] == "evaluation"]
        (line,) = [line for line in every if line["update"] == update]
        lines.append({key: value for key, value in line.items() if not key.endswith("_s")})
    assert lines[0] == lines[1]
    ours, theirs = (folder / "evaluations" / f"update-{update:06d}" for folder in (found, wanted))
    assert ours.with_suffix(".json").read_text() == theirs.with_suffix(".json").read_text()
    with np.load(ours.with_suffix(".npz")) as mine, np.load(theirs.with_suffix(".npz")) as others:
        assert all(np.array_equal(mine[name], others[name]) for name in ("images", "scores"))
        assert len(mine["images"]) == 6


def missing_gradients(ranks: World) -> list[Any]:
    """Rank r has a gradient for parameter r alone; nobody has one for the last."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(ranks.size + 1)]
    parameters[ranks.rank].grad = torch.full((2,), 1.0 + ranks.rank)
    ranks.sum_gradients(parameters, parameters)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def unequal_weights(ranks: World) -> list[str]:
    """What is said of equal weights, and after one bit changed on rank 1."""
    policy, said = ToyPolicy(Flow()), []
    for change in (False, True):
        if change and ranks.rank == 1:
            with torch.no_grad():
                weight = policy.module.outer.weight
                weight[0, 0] = weight[0, 0].nextafter(torch.tensor(torch.inf, dtype=torch.float64))
        try:
            ranks.check_equal(policy.module.parameters(), "update 3")
            said.append("equal")
        except ValueError as error:
            said.append(str(error))
    return said


def rank_0_fails(ranks: World) -> str:
    """How each rank takes it that what it should be told could not be had."""

    def refuse() -> None:
        raise ValueError("no such recipe")

    try:
        ranks.told(refuse)
    except ValueError as error:
        return str(error)
    except SystemExit as end:
        return f"exit {end.code}"
    return "went on"


class Stop(Exception):
    pass


def blind_to_first(images, prompts):
    """Equal rewards for the first prompt: its groups are dead, and drawn again."""
    return torch.where(torch.tensor([p == "first" for p in prompts]), 0.0, images.mean((1, 2, 3)))


def deadly(images, prompts):
    """The same, but in the first attempt rank 1 is killed as it scores for the ninth time: in the third update."""
    deadly.calls += 1
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], deadly.calls) == ("1", "0", 9):
        os.kill(os.getpid(), signal.SIGKILL)
    return blind_to_first(images, prompts)


deadly.calls = 0


def counted_run(ranks: World, recipe: Path, folder: Path) -> list[tuple[str, int]]:
    """What is sent from the end of a run's second update to the end of its third, with nothing else due."""
    from onetake.run import config
    from onetake.run.session import opened
    from onetake.run.train import Watcher, train

    quiet = ("rollout.resample=0", "kl={}", "evaluation.every=9", "checkpoint.every=9")
    session = ranks.told(lambda: opened(str(recipe), [f"out={folder}", *quiet], ranks.size))
    ends = []
    with Collectives() as sent:
        watch = Watcher(say=lambda line: None, update=lambda columns: ends.append(len(sent.seen)))
        train(session.recipe, folder, config.dump(session.recipe), watch, ranks)
    return sent.seen[ends[1] : ends[2]]


def restarted_run(recipe: Path, *overrides: str) -> str:
    """In a process that torchrun's agent has started, perhaps again."""
    torch.set_num_threads(1)
    with world() as ranks:
        return whole_run(ranks, recipe, *overrides)


def whole_run(ranks: World, recipe: Path, *overrides: str) -> str:
    """A run as the command line makes it; what it printed."""
    from rich.console import Console

    from onetake.run.session import opened, train_and_report

    printed, threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)  # alone as on each of several ranks: matrix products of more threads round otherwise
    try:
        session = ranks.told(lambda: opened(str(recipe), list(overrides), ranks.size))
        train_and_report(session, Console(file=printed, width=200), ranks)
    finally:
        torch.set_num_threads(threads)
    return printed.getvalue()


def broken_run(ranks: World, recipe: Path, after: int, *overrides: str) -> None:
    """A run that dies in the update that follows `after`, and is continued."""
    from onetake.run import config
    from onetake.run.session import continued, opened
    from onetake.run.train import Watcher, train

    def die(columns: dict) -> None:
        if columns["update"] > after:
            raise Stop

    session = ranks.told(lambda: opened(str(recipe), list(overrides), ranks.size))
    text = config.dump(session.recipe)
    try:
        train(session.recipe, session.folder, text, Watcher(say=lambda line: None, update=die), ranks)
    except Stop:
        session = ranks.told(lambda: continued(session.folder, [], ranks.size))
        train(session.recipe, session.folder, text, Watcher(say=lambda line: None), ranks)
    else:
        raise AssertionError("it was to die")


def tiny_session(ranks: World, recipe: Path, root: Path) -> tuple[str, list[tuple[str, int]]]:
    """Runs of a tiny pipeline in folders of `root`; what the first printed, and what an update of the last sent."""
    printed = whole_run(ranks, recipe, f"out={root / 'whole'}")
    broken_run(ranks, recipe, 2, f"out={root / 'broken'}")
    whole_run(ranks, recipe, f"out={root / 'conventional'}", *CONVENTIONAL)
    return printed, counted_run(ranks, recipe, root / "counted")


CONVENTIONAL = (
    "rollout.layout=conventional",
    "rollout.micro_batch=4",
    "execution=reweight",
    "updates_per_rollout=2",
    "ema={decay: 0.5, every: 2}",
)


# Sharded weights


def latents_length(x, prompts):
    return x.flatten(1).norm(dim=1)


def tiny_policy(kind: str) -> Any:
    """A float64 pipeline of which adapters, or all weights, are trained."""
    from onetake.policies.adapters import Full, Lora
    from onetake.policies.diffusion import DiffusionPolicy
    from onetake.policies.loading import PolicyConfig
    from tiny import tiny_sd3

    pipe = tiny_sd3(dtype=torch.float64)
    {"lora": Lora(rank=2), "full": Full()}[kind].attach(pipe, 0)
    pipe.transformer.double()
    policy = DiffusionPolicy(pipe, PolicyConfig(steps=3, call={"max_sequence_length": 8}), output_type="latent")
    move(policy)
    return policy


def sharded_update(ranks: World, kind: str, execution: str, sizes: dict[str, Any], shard: Any) -> dict[str, Any]:
    """The gradient of one update of a tiny float64 pipeline whose transformer is sharded over `shard` ranks; what was sent."""
    policy, objective, strategy = tiny_policy(kind), Grpo(), EXECUTIONS[execution]()
    mesh = ParallelConfig(shard=shard).mesh(ranks.size, torch.device("cpu"))
    if mesh is not None:
        policy.shard(mesh)
    config, address = RolloutConfig(**sizes), Address(seed=1, stream="train", update=0)
    dealt = deal(config, PROMPTS, policy, All(), objective, address)
    parameters = trainable(policy)
    with Collectives() as sampling:
        rollout = sample(policy, strategy, config.over(ranks.size).share(dealt, ranks.rank), dealt)
    score(rollout, Rewards(functions={"length": latents_length}, weights={"length": 1.0}), Advantages(), None, ranks)
    with Collectives() as backward:
        strategy.accumulate(policy, rollout, Coefficients(objective, rollout))
    with Collectives() as reduction:
        ranks.sum_gradients(parameters.values(), leaves(policy).values())
    return {
        "gradient": {name: whole(p.grad) for name, p in parameters.items()},
        "held": sum(held(p).numel() for p in policy.module.parameters()),
        "sampling": sampling.seen,
        "backward": backward.seen,
        "reduction": reduction.seen,
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_updates(ranks: World, cases: list[tuple], shard: Any = "all") -> list[dict[str, Any]]:
    return [sharded_update(ranks, *case, shard) for case in cases]


def continued_run(ranks: World, folder: Path, *overrides: str) -> None:
    """Goes on with the run in `folder`."""
    from onetake.run import config
    from onetake.run.session import continued
    from onetake.run.train import Watcher, train

    session = ranks.told(lambda: continued(folder, list(overrides), ranks.size))
    train(session.recipe, folder, config.dump(session.recipe), Watcher(say=lambda line: None), ranks)


def sharded_session(ranks: World, cases: list[tuple], recipe: Path, root: Path, shard: Any = "all") -> list[dict]:
    """The updates of `cases`; a sharded run's first half, the second half of a run that one process began, and a run in halves."""
    begun, sharding = root / f"begun-on-{ranks.size}", f"parallel.shard={shard}"
    updates = sharded_updates(ranks, cases, shard)
    whole_run(ranks, recipe, f"out={begun}", "updates=1", sharding)
    continued_run(ranks, root / "begun-on-1", "updates=2", sharding)
    whole_run(ranks, recipe, f"out={root / 'lora'}", "updates=1", sharding, *LORA)
    continued_run(ranks, root / "lora", "updates=2", sharding)
    return updates


LORA = ("policy.trainable={kind: lora, rank: 2}", "ema=null", "execution=retain")


def sharded_decoder(ranks: World) -> dict[str, Any]:
    """Gradients of a tiny decoder under FSDP2, this rank's plan unlike the others', against no checkpointing; kept bytes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from models import decoder, equal, planned, replan, tokens
    from onetake.activations.recovery import Recovery
    from onetake.activations.units import CaptureError

    ids, found = tokens(ranks.size)[ranks.rank, None], {}
    for dtype in (torch.float32, torch.bfloat16):
        whole_weights = planned(decoder(dtype=dtype, dropout=0.1), "HERE")
        whole_weights.host(ids)
        model = decoder(dtype=dtype, dropout=0.1)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (ranks.size,)))

        def gradient() -> dict[str, torch.Tensor]:
            model.zero_grad(set_to_none=True)  # noqa: B023
            torch.manual_seed(ranks.rank)
            model(ids, labels=ids).loss.backward()  # noqa: B023
            return {name: whole(p.grad).clone() for name, p in model.named_parameters()}  # noqa: B023

        plain, attachment = gradient(), planned(model, "HERE")
        for plans in (("HERE", "HERE"), ("HERE", "RHER"), ("RRRR", "HHHH")):
            replan(attachment, plans[ranks.rank])
            gradient()  # records what E keeps
            replays = sum(unit.replays for unit in attachment.units)
            same = equal(gradient(), plain)
            found[f"{dtype} {plans}"] = same, sum(unit.replays for unit in attachment.units) - replays
        replan(attachment, "HERE")
        gradient()
        found[f"{dtype} bytes"] = [[unit.captured for unit in a.units] for a in (attachment, whole_weights)]
        attachment.detach()
        try:
            with Recovery(model, memory="90%").step():
                gradient()
        except CaptureError as error:
            found[f"{dtype} unmeasured"] = str(error)
    return found


def grown(ranks: World) -> tuple[list[tuple[float, float, float]], str]:
    """Of two steps, before and after 64 MiB come into use: growth and peak foretold, and measured, MiB. What a third is told."""
    from models import decoder, tokens
    from onetake.activations.plan import MIB
    from onetake.activations.recovery import Recovery
    from onetake.memory import parse_budget

    model, ids = decoder(), tokens()
    for _ in range(2):  # what is loaded and allocated once in a process, is so before it counts
        recovery = Recovery(model, memory="100%")
        for _ in range(2):
            with recovery.step():
                model(ids, labels=ids).loss.backward()
        recovery.detach()
    recovery = Recovery(model, memory="100%")
    with recovery.step():
        model(ids, labels=ids).loss.backward()
    measured = recovery.profile.buckets[0].peak
    recovery.memory = parse_budget(measured + 65 * MIB)
    state, told = [], []
    for _ in range(2):
        with recovery.step():
            model(ids, labels=ids).loss.backward()
        report = recovery.report()
        told.append((report["predicted_peak_mib"] - measured / MIB, report["predicted_peak_mib"], report["peak_mib"]))
        state.append(torch.ones(64 * MIB // 4))
    try:
        with recovery.step():
            model(ids)
    except ValueError as error:
        return told, str(error)
    return told, "nothing"
