"""Makes `tests.helpers` importable without putting the checkout before the installed package."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent.parent))
