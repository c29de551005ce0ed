"""Makes `tests.helpers` importable without putting the checkout before the installed package."""

import os
import pathlib
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that tests start, too

sys.path.append(str(pathlib.Path(__file__).parent.parent))
