"""Makes `tests.helpers` importable without putting the checkout before the installed package."""

import atexit
import os
import pathlib
import shutil
import sys
import tempfile

os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that tests start, too

# private daemons keep what they learn where no other test, nor the user's own daemon, finds it
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="st-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

sys.path.append(str(pathlib.Path(__file__).parent.parent))
