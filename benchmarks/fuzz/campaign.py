"""Are gradients, outputs and buffers of random residual nets those of autograd?

    python -m benchmarks run fuzz --count 10000 --jobs 16 --out findings
    python -m benchmarks run fuzz --seed 7 --count 200
    python -m benchmarks run fuzz --only 137                # one net of the seed again

Each net goes through capture, reversify and petrafy and is compared with the original, with stored
activations and with autograd. Findings are made small and written to --out, each as a script of its
own. The same seed gives the same nets on every machine.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import track

from benchmarks.fuzz.choices import Seeded
from benchmarks.fuzz.net import Net, draw_net
from benchmarks.fuzz.oracle import METHODS, Finding, Refusal, examine, programs
from benchmarks.fuzz.shrink import same_finding, script, shrink
from benchmarks.harness import show
from benchmarks.registry import Benchmark, Row

CHUNK: Final = 20
"""Nets a worker process takes at a time."""


@dataclass(frozen=True)
class Outcome:
    """What came of one net, as it is sent between processes."""

    index: int
    discarded: str | None = None
    findings: tuple[Finding, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    compared: int = 0
    seconds: float = 0.0
    smallest: dict[tuple[str, str, str], Net] = field(default_factory=dict)


def net_of(seed: int, index: int) -> Net:
    """The net with this number."""
    return draw_net(Seeded(f"{seed}:{index}"))


class TooLong(Exception):
    """A net took longer than it may."""


def _stop(*_: Any) -> None:
    raise TooLong


def examine_net(seed: int, index: int, limit: int, trials: int) -> Outcome:
    """Examine a net; make it smaller if it fails."""
    start = time.perf_counter()
    signal.signal(signal.SIGALRM, _stop)
    net = net_of(seed, index)
    signal.alarm(limit)
    try:
        report = examine(net)
    except TooLong:
        finding = Finding("foreign", "time", f"it took longer than {limit} s")
        return Outcome(index, findings=(finding,), smallest={finding.key: net}, seconds=limit)
    finally:
        signal.alarm(0)
    found = {finding.key: finding for finding in reversed(report.findings)}
    smallest = _smallest_of_each(net, list(reversed(found.values())), limit, trials)
    return Outcome(
        index,
        report.discarded,
        tuple(found.values()),
        tuple(report.refusals),
        len(report.checks),
        time.perf_counter() - start,
        smallest,
    )


def _smallest_of_each(
    net: Net, findings: Iterable[Finding], limit: int, trials: int
) -> dict[tuple[str, str, str], Net]:
    """A small net for every finding. Most findings of a net have one cause: one shows many."""
    smallest: dict[tuple[str, str, str], Net] = {}
    known: dict[tuple[str, str], Net] = {}
    for finding in findings:
        check = (finding.kind, finding.check)
        if check not in known:
            small = _smallest(net, finding, limit, trials)
            for other in examine(small).findings:
                known.setdefault((other.kind, other.check), small)
            known.setdefault(check, small)
        smallest[finding.key] = known[check]
    return smallest


def _smallest(net: Net, finding: Finding, limit: int, trials: int) -> Net:
    fails, smallest = same_finding(finding), net

    def still(smaller: Net) -> bool:
        nonlocal smallest
        failed = fails(smaller)
        smallest = smaller if failed else smallest
        return failed

    signal.alarm(4 * limit)
    try:
        return shrink(net, still, trials)
    except TooLong:
        return smallest
    finally:
        signal.alarm(0)


def examine_chunk(task: tuple[int, list[int], int, int, float]) -> list[Outcome]:
    """Some nets, in a worker process; none is begun after the deadline."""
    seed, indices, limit, trials, deadline = task
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    return [
        examine_net(seed, index, limit, trials) for index in indices if time.monotonic() < deadline
    ]


def outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    """All nets, in order."""
    indices = [options.only] if options.only is not None else list(range(options.count))
    deadline = time.monotonic() + options.seconds
    settings = options.limit, options.shrink, deadline
    tasks = [
        (options.seed, indices[i : i + CHUNK], *settings) for i in range(0, len(indices), CHUNK)
    ]
    if options.jobs <= 1:
        threads = torch.get_num_threads()
        for task in track(tasks, "nets", disable=len(tasks) < 2):
            yield from examine_chunk(task)
        torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=context, max_tasks_per_child=10
    ) as pool:
        # Only a few at a time: after the deadline no worker is started for nothing.
        ahead, running = 2 * options.jobs, collections.deque[Any]()
        for task in track([*tasks, *[None] * ahead], "nets"):
            if task is not None and time.monotonic() < deadline:
                running.append(pool.submit(examine_chunk, task))
            if running and (task is None or len(running) > ahead):
                yield from running.popleft().result()


def programs_of(task: tuple[int, list[int]]) -> list[str]:
    """What some nets compile to, in a worker process."""
    torch.set_num_threads(1)
    return [programs(net_of(task[0], index)) for index in task[1]]


def unequal_programs(options: argparse.Namespace) -> list[int]:
    """Nets that compile to other programs under another PYTHONHASHSEED."""
    indices = list(range(min(options.hashed, options.count)))
    tasks = [(options.seed, indices[i : i + CHUNK]) for i in range(0, len(indices), CHUNK)]
    before, found = os.environ.get("PYTHONHASHSEED"), []
    for hash_seed in ("1", "2"):
        os.environ["PYTHONHASHSEED"] = hash_seed
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
            found.append([text for chunk in pool.map(programs_of, tasks) for text in chunk])
    os.environ.pop("PYTHONHASHSEED")
    if before is not None:
        os.environ["PYTHONHASHSEED"] = before
    return [i for i, one, other in zip(indices, *found, strict=True) if one != other]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--count", type=int, default=1000, help="how many nets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes of one thread each")
    parser.add_argument("--only", type=int, help="the number of the only net to look at")
    parser.add_argument("--limit", type=int, default=60, help="seconds a net may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after these")
    parser.add_argument("--shrink", type=int, default=60, help="trials to make a finding smaller")
    parser.add_argument(
        "--hashed", type=int, default=0, help="compile this many nets under two PYTHONHASHSEEDs"
    )
    parser.add_argument("--out", type=Path, help="a folder for findings, as scripts")


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Print the tables, write the findings."""
    start, done, unequal = time.perf_counter(), list[Outcome](), list[int]()
    written: dict[tuple[str, ...], int] = {}
    for outcome in outcomes(options):
        done.append(outcome)
        for finding in outcome.findings:
            net = outcome.smallest[finding.key]
            first = finding.check.replace(",", "").split()[0]
            cause = (finding.kind, first, *sorted({p.kind for p in net.parts}))
            if cause in written:
                written[cause] += 1
                continue
            written[cause] = 1
            row = {
                "failed": f"{finding.kind}, {finding.check}: {finding.what.splitlines()[0]}",
                "index": outcome.index,
                "net": repr(net),
            }
            if options.out is not None:
                row["script"] = _write(options.out, outcome.index, net, finding)
            yield row
    if options.hashed:
        unequal = unequal_programs(options)
        for index in unequal:
            net = net_of(options.seed, index)
            what = "wrong, programs: they depend on PYTHONHASHSEED"
            yield {"failed": what, "index": index, "net": repr(net)}
    summary = _summary(done, time.perf_counter() - start)
    summary["programs that depend on PYTHONHASHSEED"] = len(unequal)
    yield summary
    _show(summary, written)


def _write(folder: Path, index: int, net: Net, finding: Finding) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    check = finding.check.replace(", ", "_").replace(" ", "_")
    file = folder / f"{finding.kind}_{check}_{index}.py"
    file.write_text(script(net, finding))
    if finding.detail:
        file.with_suffix(".txt").write_text(finding.detail)
    return str(file)


def _summary(done: Iterable[Outcome], seconds: float) -> dict[str, Any]:
    """The campaign in one row."""
    used = [outcome for outcome in done if outcome.discarded is None]
    wrong = [{f.what.split(":")[0] for f in o.findings if f.kind == "wrong"} for o in used]
    return {
        "nets": len(used),
        "discarded": len(list(done)) - len(used),
        "comparisons": sum(outcome.compared for outcome in used),
        "wrong gradients": sum(bool(w & {"gradients", "gradient path"}) for w in wrong),
        "wrong outputs": sum("outputs" in w for w in wrong),
        "wrong buffers": sum("buffers" in w for w in wrong),
        "wrong modes": sum("modes" in w for w in wrong),
        "foreign tracebacks": sum(any(f.kind == "foreign" for f in o.findings) for o in used),
        "refused as our own bug": sum(any(f.kind == "bug" for f in o.findings) for o in used),
        "refused": sum(any(r.check in ENTRIES for r in o.refusals) for o in used),
        "refused by reason": dict(_reasons(used).most_common()),
        "seconds": round(seconds, 1),
    }


ENTRIES: Final = ("capture", "reversify", "petrafy")
"""Checks whose refusal means that the compiler does not take the net at all."""


def _reasons(used: Iterable[Outcome]) -> collections.Counter[str]:
    counted: collections.Counter[str] = collections.Counter()
    for outcome in used:
        counted.update({f"{refusal.check}: {refusal.reason}" for refusal in outcome.refusals})
    return counted


def _show(summary: dict[str, Any], written: dict[tuple[str, ...], int]) -> None:
    row = dict(summary)
    reasons = row.pop("refused by reason")
    nets = max(row["nets"], 1)
    shares = {"seconds", "comparisons", "nets"}
    lines = [
        (name, value, "" if name in shares else f"{value / nets:.1%}")
        for name, value in row.items()
    ]
    show(f"random nets, methods {', '.join(METHODS)}", ("", "nets", "share"), lines)
    if reasons:
        lines = [(reason, count, f"{count / nets:.2%}") for reason, count in reasons.items()]
        show("refused, by reason", ("reason", "nets", "share"), lines)
    if written:
        lines = [(", ".join(cause), count) for cause, count in written.items()]
        show("findings, by check and parts", ("finding", "nets"), lines)


BENCHMARK = Benchmark("fuzz", arguments, main, smallest=("--seed", "1", "--count", "3"))
