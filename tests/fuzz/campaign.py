"""Compare outputs, gradients and buffers of random residual nets with autograd's.

    python -m tests.fuzz --count 10000 --jobs 16 --json findings.json
    python -m tests.fuzz --seed 7 --count 200
    python -m tests.fuzz --seed 7 --only 137            # one net again, with its source
    python -m tests.fuzz --backend aot_eager --count 1000 --jobs 16     # couplings compiled

Each net goes through capture, reversify and petrafy and is compared with the original, with stored
activations and with autograd; so is what is compiled and run under autocast, and what deepcopy,
pickle and torch.save return. Findings are made small. The same seed gives the same nets on every
machine.
"""

import argparse
import json
import logging
import math
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from tests.fuzz.module import source
from tests.fuzz.net import net_of
from tests.fuzz.oracle import PHASES, Finding, examine, shrink

CHUNK: Final = 20
"""Nets that a worker process takes at a time."""
ENTRIES: Final = ("capture", "reversify", "petrafy")
"""Checks whose refusal means that the compiler does not take the net at all."""


class TooLong(Exception):
    """A net took longer than it may."""


def _stop(*_: Any) -> None:
    raise TooLong


COMPILED: Final = tuple(phase for phase in PHASES if phase in ("reversify", "autocast"))
"""What compiling couplings may change."""


def examine_net(seed: int, index: int, limit: int, backend: str | None) -> dict[str, Any]:
    """Examine a net. Findings of one kind and check are made small once."""
    signal.signal(signal.SIGALRM, _stop)
    net = net_of(seed, index)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    row: dict[str, Any] = {"index": index, "compared": 0, "refused": []}
    signal.alarm(limit)
    try:
        phases = PHASES if backend is None else COMPILED
        report = examine(net, phases=phases, backend=backend)
        row |= {"compared": len(report.checks), "discarded": report.discarded}
        row["refused"] = [[refusal.check, refusal.reason] for refusal in report.refusals]
        findings = report.findings
        if any(f.kind == "bug" for f in findings) and net.precision != "float64":
            # What holds in float64 is no bug: blocks that amplify cannot be rebuilt in float32.
            twin = examine(replace(net, precision="float64"), phases=phases, backend=backend)
            exact = {finding.check for finding in twin.findings}
            lost = [f for f in findings if f.kind == "bug" and f.check not in exact]
            row["refused"] += [[f.check, f"only in {net.precision}: {f.what}"] for f in lost]
            findings = [f for f in findings if f not in lost]
    except TooLong:
        findings = [Finding("foreign", "time", f"it took longer than {limit} s")]
    finally:
        signal.alarm(0)
    for finding in findings:
        key = finding.kind, finding.check.split(",")[0]
        if key not in found:
            found[key] = {"what": finding.what, "net": repr(net), "detail": finding.detail}
            signal.alarm(4 * limit)
            try:
                found[key]["net"] = repr(shrink(net, finding, backend))
            except TooLong:
                pass
            finally:
                signal.alarm(0)
    row["findings"] = [{"kind": k, "check": c, **rest} for (k, c), rest in found.items()]
    return row


def examine_chunk(
    seed: int, indices: Sequence[int], limit: int, backend: str | None, deadline: float
) -> list[Any]:
    """Some nets, in a worker process; none is begun after the deadline."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    rest = limit, backend
    return [examine_net(seed, index, *rest) for index in indices if time.time() < deadline]


def _examine(task: tuple[int, Sequence[int], int, str | None, float]) -> list[Any]:
    return examine_chunk(*task)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each net, in any order."""
    indices = [args.only] if args.only is not None else list(range(args.count))
    chunks = [indices[i : i + CHUNK] for i in range(0, len(indices), CHUNK)]
    rest = args.limit, args.backend, time.time() + args.seconds
    if args.jobs <= 1:
        for chunk in chunks:
            yield from examine_chunk(args.seed, chunk, *rest)
        return
    tasks = [(args.seed, chunk, *rest) for chunk in chunks]
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=10) as pool:
        for rows in pool.imap_unordered(_examine, tasks):
            yield from rows


def summary_of(rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The campaign in figures."""
    used = [row for row in rows if not row.get("discarded")]
    kinds = Counter(kind for row in used for kind in {f["kind"] for f in row["findings"]})
    reasons = Counter(f"{check}: {why}" for row in used for check, why in row["refused"])
    return {
        "nets": len(used),
        "discarded": len(rows) - len(used),
        "comparisons": sum(row["compared"] for row in used),
        "silently wrong": kinds["wrong"],
        "foreign tracebacks": kinds["foreign"],
        "refused as a bug of the compiler": kinds["bug"],
        "refused": sum(any(check in ENTRIES for check, _ in row["refused"]) for row in used),
        "refused by reason": dict(reasons.most_common()),
        "seconds": round(seconds, 1),
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--count", type=int, default=1000, help="number of nets (default: 1000)")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=1, help="worker processes of one thread each")
    add("--only", type=int, metavar="INDEX", help="examine this net alone")
    add("--backend", help="compile couplings with this backend of torch.compile")
    add("--limit", type=int, default=60, help="seconds per net (default: 60)")
    add("--seconds", type=float, default=math.inf, help="begin no net after these")
    add("--json", type=Path, metavar="FILE", help="write summary and findings")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary; the exit code is 1 if anything was found."""
    args, start, rows = parse_args(argv), time.perf_counter(), list[dict[str, Any]]()
    if args.only is not None:
        print(source(net_of(args.seed, args.only)))
    for row in rows_of(args):
        rows.append(row)
        for finding in row["findings"]:
            print(f"{row['index']}: {finding['kind']}, {finding['check']}: {finding['what']}")
            print(f"    {finding['net']}", flush=True)
    summary = summary_of(rows, time.perf_counter() - start)
    for name, value in summary.items():
        if isinstance(value, dict):
            print(f"{name}:")
            print("\n".join(f"{count:8}  {reason}" for reason, count in value.items()))
        else:
            print(f"{name}: {value}")
    found = [row for row in rows if row["findings"]]
    if args.json is not None:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"options": options, "summary": summary, "findings": found}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(found))
