"""Results of trainings in a folder: each in its own, and all of them in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def gather(out: Path) -> dict[str, Result]:
    """All results so far by name, of this machine and of others, collected in `results.json`."""
    file = out / "results.json"
    results: dict[str, Result] = json.loads(file.read_text()) if file.exists() else {}
    for path in sorted(out.glob("*/result.json")):
        result = json.loads(path.read_text())
        results[result["name"]] = result
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results))
    return results
