#!/usr/bin/env python3
"""In the place of the launcher in a batch script: writes down how it was called and what it hears.

STAND_IN_DIR: where. STAND_IN_CODE: what it ends with; without it, it waits for a signal and ends with 75.
"""

import json
import os
import signal
import sys
from pathlib import Path

folder = Path(os.environ["STAND_IN_DIR"])
told = {
    "argv": sys.argv[1:],
    "python_path": os.environ.get("PYTHONPATH"),
    "batch": os.environ.get("NANOSCALE_BATCH"),
    "setup": os.environ.get("FROM_SETUP"),
}
if "STAND_IN_CODE" not in os.environ:
    wanted = {signal.SIGUSR1, signal.SIGTERM}
    if "STAND_IN_YOUNG" not in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    (folder / "called.new").write_text(json.dumps(told))
    (folder / "called.new").rename(folder / "called")
    if "STAND_IN_YOUNG" in os.environ:
        signal.pause()  # it ends here
    heard = signal.sigwait(wanted)
    (folder / "heard").write_text(signal.Signals(heard).name)
    sys.exit(75)
(folder / "called").write_text(json.dumps(told))
sys.exit(int(os.environ["STAND_IN_CODE"]))
