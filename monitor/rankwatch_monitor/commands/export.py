"""``rankwatch export``: the record of a run as JSON lines, or for pandas, polars, DuckDB, Spark or TensorBoard."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rankwatch.errors import UsageError
from rankwatch.shared.printable import printable
from rankwatch.shared.system.installed import to_add

from ..record.reader import RunRecord
from ..views.export import json_lines
from ..views.export.origin import origin_of
from ..views.export.written import describe
from . import arguments as types
from .records import open_record

WHAT = "summaries", "envelope", "digests"


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_run(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--parquet", metavar="OUT", help="write this file: a path, or a URL such as s3://bucket/run.parquet")
    target.add_argument("--tensorboard", metavar="OUT", type=Path, help="write scalars of each module to this folder")
    target.add_argument("--jsonl", action="store_true", help="print the whole record as JSON lines")
    parser.add_argument("--frames", action="store_true", help="with --jsonl: the batches, too, as the ranks sent them")
    parser.add_argument(
        "--what",
        choices=WHAT,
        help="rows of the Parquet file: summaries: readings as the ranks sent them; envelope: readings over all ranks, of more "
        "batches; digests: one row for each part of a batch (default: summaries)",
    )
    parser.add_argument(
        "--rank", type=types.whole("R", 0, 1 << 31), metavar="R", help="export this rank alone (default: all ranks)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")


def main(arguments: argparse.Namespace) -> int:
    run = types.run_folder(arguments.run)
    if arguments.jsonl and (arguments.what or arguments.rank is not None):
        raise UsageError("--what and --rank go with --parquet or --tensorboard: --jsonl prints the whole record")
    if arguments.frames and not arguments.jsonl:
        raise UsageError("--frames goes with --jsonl: --parquet has the frames as rows")
    if arguments.tensorboard and arguments.what:
        raise UsageError("--what goes with --parquet: TensorBoard gets the readings over all ranks, or those of one --rank")
    if arguments.what == "envelope" and arguments.rank is not None:
        raise UsageError("--what envelope is over all ranks: leave out --rank, or export summaries")
    try:
        with open_record(run) as record:
            if arguments.jsonl:
                for line in json_lines.lines(record, frames=arguments.frames):
                    sys.stdout.write(line + "\n")
            else:
                _export(record, arguments)
    except ModuleNotFoundError as error:
        library = (error.name or str(error)).partition(".")[0]
        raise UsageError(f"this needs {library}: {to_add('export')}") from None
    return 0


def _export(record: RunRecord, arguments: argparse.Namespace) -> None:
    origin, rank, what = origin_of(record), arguments.rank, arguments.what or WHAT[0]
    if rank is not None and rank >= origin.world_size:
        raise UsageError(f"no rank {rank}: run {origin.run} has ranks 0 to {origin.world_size - 1}")
    trained, hint = record.last_batch() + 1, ""
    # Imported here: only their own export needs the libraries of the extra.
    if arguments.tensorboard:
        from ..views.export import events

        written = events.write(record, arguments.tensorboard, rank, overwrite=arguments.overwrite)
        things, into = "scalars", str(arguments.tensorboard)
    else:
        from ..views.export import parquet, target

        into, things = arguments.parquet, "rows"
        with target.whole(into, overwrite=arguments.overwrite) as file:
            written = parquet.write(record, origin, what, file, rank)
        hint = " as sent: --what envelope has more of them" if what == "summaries" else ""
        trained = trained if what != "digests" else 0  # digests are not in the order of the batches, and are dropped last
    sys.stderr.write(f"rankwatch: {printable(describe(written, things, origin.run, into, trained, hint))}\n")
