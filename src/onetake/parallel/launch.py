"""``onetake train --nproc N``: torchrun on this machine, started for the user; and what torchrun says of its restarts."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def launch(processes: int, arguments: list[str], *, restarts: int = 0) -> None:
    """Run ``onetake ARGUMENTS`` in `processes` processes; all of them again, up to `restarts` times, when one has died.

    Raises ValueError naming the first one that failed in the last attempt.
    """
    options = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    try:
        torchrun([*options, "-m", "onetake", *arguments])
    except SignalException as end:  # passed on to the ranks, and rank 0 has said how the run ended
        raise SystemExit(128 + end.sigval) from end
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise ValueError(
            f"rank {rank} ended with exit code {failure.exitcode}; what it said is above, and the other ranks were ended"
        ) from error


def may_restart() -> bool:
    """Whether torchrun will start this process again if a rank dies (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def restarted() -> bool:
    """Whether it has."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
