"""Helpers of the charts, and a chart without memory."""

import os
import subprocess
import sys

import numpy as np
import pytest

from open_clip_zerovl.report.pages import moving_average
from support import ROOT

LIMITED = """
import mmap, resource, sys
import matplotlib.backends.backend_agg, matplotlib.figure, numpy.random
from open_clip_zerovl.report.pages import Line, line_chart
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 2**29, resource.RLIM_INFINITY))
taken = []
try:
    while True:
        taken.append(mmap.mmap(-1, 2**20))
except OSError:
    del taken[:int(sys.argv[1])]
print(line_chart([Line("a", [0, 1], [1, 2])], x="x", y="y")[1:4].decode())
"""


def test_a_moving_average_takes_fewer_neighbours_at_the_ends_and_leaves_out_what_diverged():
    assert moving_average(np.array([1.0, 2, 6]), 1).tolist() == [1.5, 3, 4]
    assert moving_average(np.array([1.0]), 3).tolist() == [1]
    found = moving_average(np.array([1.0, np.nan, 3, np.inf, np.nan, np.nan]), 1)
    np.testing.assert_array_equal(found, [1, 2, 3, 3, np.nan, np.nan])


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_chart_without_memory_is_an_error_and_no_endless_loop_of_openblas(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["MPLCONFIGDIR"] = str(tmp_path)  # the first call looks for fonts, and inverts
    for room_mib, output, error in ((400, "PNG", ""), (24, "", "MemoryError: no room for")):
        line = [sys.executable, "-c", LIMITED, str(room_mib)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == output and error in done.stderr
