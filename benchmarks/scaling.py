"""What `onetake.scaling` predicts of LeanGRPO's ablation (arXiv 2609.03528, Table 1), beside what was published.

    python benchmarks/scaling.py

FLUX.1-dev on 8 × A6000, every step trained, seconds per update. Put in are the published row "+ coalesced", of each kind of
training, which gives the seconds of a forward, and the row "native" of full fine-tuning, which gives the number of reductions
that coalescing saves. A backward is two forwards of a full fine-tune, one of LoRA. The other rows are predicted. Weights are taken
to be whole on every device, and PCIe 4.0 to send 25 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator

from onetake.scaling import Machine, Message, Profile, Share

PUBLISHED = {
    "full": {
        "native": 1850.06,
        "+ shared prompts": 1851.75,
        "+ coalesced": 1387.56,
        "retain": 1438.53,
        "reweight": 1022.64,
    },
    "LoRA": {
        "native": 1277.30,
        "+ shared prompts": 1279.21,
        "+ coalesced": 1263.35,
        "retain": 901.99,
        "reweight": 880.68,
    },
}
FITTED = {("full", "native"), ("full", "+ coalesced"), ("LoRA", "+ coalesced")}
EXECUTIONS = {"retain": "retain", "reweight": "reweight"}  # the other rows run `recompute`
BACKWARD = {"full": 2, "LoRA": 1}  # forwards
GRADIENT = {"full": 11.9e9 * 2, "LoRA": 52.3e6 * 4}  # bytes: all weights in bfloat16; rank 32 on attention in float32
A6000 = Machine(ranks=8, link=25e9)
UPDATE = Share(trajectories=1, steps=1, events=1, calls=1, event_calls=1)  # all of a rank's forwards are one unit


def reduction(kind: str) -> float:
    """Seconds of one sum of gradients: of a full fine-tune a reduce-scatter, whose optimizer is sharded."""
    operation = "reduce_scatter" if kind == "full" else "all_reduce"
    return A6000.seconds([Message(operation=operation, count=1, size=int(GRADIENT[kind]), among=8, span=8)])


def predicted() -> dict[str, dict[str, float]]:
    saved = (PUBLISHED["full"]["native"] - PUBLISHED["full"]["+ coalesced"]) / reduction("full")  # reductions
    found = {}
    for kind, rows in PUBLISHED.items():
        computing = rows["+ coalesced"] - reduction(kind)
        forward = computing / (2 + BACKWARD[kind])
        profile = Profile(forward=forward, backward=BACKWARD[kind] * forward)
        found[kind] = {}
        for row in rows:
            eager = saved * reduction(kind) if row in ("native", "+ shared prompts") else 0.0
            seconds = profile.seconds(UPDATE, EXECUTIONS.get(row, "recompute"))
            found[kind][row] = seconds + reduction(kind) + eager
    return found


def lines() -> Iterator[str]:
    yield "| trained | row | published, s | predicted, s | error | published ratio | predicted ratio |"
    yield "|---|---|---|---|---|---|---|"
    for kind, rows in predicted().items():
        for row, seconds in rows.items():
            wanted = PUBLISHED[kind][row]
            error = "put in" if (kind, row) in FITTED else f"{seconds / wanted - 1:+.1%}"
            ratios = f"{PUBLISHED[kind]['native'] / wanted:.2f}× | {rows['native'] / seconds:.2f}×"
            yield f"| {kind} | {row} | {wanted:.2f} | {seconds:.2f} | {error} | {ratios} |"


if __name__ == "__main__":
    print("\n".join(lines()))
