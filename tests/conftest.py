"""What holds for every test: one compute thread per process.

Tests run side by side, each with engines of its own; OpenMP threads that spin for work they do not get turn
milliseconds into minutes. Must happen before torch is imported anywhere; child processes inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
