"""Before anything imports torch: one thread a process, so that parallel workers share the cores and sums keep their order."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
