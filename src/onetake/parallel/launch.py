"""``onetake train --nproc N``: torchrun on this machine, started for the user."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def launch(processes: int, arguments: list[str]) -> None:
    """Run ``onetake ARGUMENTS`` in `processes` processes. Raises ValueError naming the first one that failed."""
    try:
        torchrun(["--standalone", "--nproc-per-node", str(processes), "-m", "onetake", *arguments])
    except SignalException as end:  # passed on to the ranks, and rank 0 has said how the run ended
        raise SystemExit(128 + end.sigval) from end
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise ValueError(
            f"rank {rank} ended with exit code {failure.exitcode}; what it said is above, and the other ranks were ended"
        ) from error
