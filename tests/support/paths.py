"""Where the repository and the modules that tests share are."""

from pathlib import Path
from typing import Final

SUPPORT: Final = Path(__file__).parent
ROOT: Final = SUPPORT.parents[1]
