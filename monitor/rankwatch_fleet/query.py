"""Asks an archive, by DuckDB. Memory does not grow with the archive: what is read of it lies in a file for the time being."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import duckdb

from rankwatch.errors import UsageError
from rankwatch_monitor.views.export.target import folder_at, is_local
from rankwatch_monitor.views.export.urls import shown

from .findings import Fleet, Hours, Recurring, Suspicion, Version, attributed, machines_of

MEMORY = "200MB"
"""What DuckDB may take; beyond it, it writes to disk."""

MOST = 50
"""Causes, modules and versions that are listed."""

DAMAGED = "damaged, or no file of an archive"

_OF_A_FILE = duckdb.InvalidInputException, duckdb.BinderException, duckdb.ConversionException, duckdb.Error
"""What DuckDB raises, these very classes, for a damaged file, or one of another kind. Others are of the disk or the network."""

_NO_PROGRESS_BAR = "SET enable_progress_bar = false"  # on by default in a notebook and under python -c, on standard output

_READ = """
SELECT id, archived, run, job, date, began, outcome, rankwatch, torch, driver,
    verdict.cause AS cause, verdict.module AS module, verdict.module_class AS module_class, suspects,
    list_transform(ranks, lambda r: {'host': r.host, 'gpu': r.gpu, 'name': r.gpu_name, 'hours': r.hours}) AS ranks
FROM read_parquet($files, hive_partitioning = true, hive_types = {'date': DATE, 'job': VARCHAR})
WHERE date BETWEEN $since AND $until
"""

_ONCE = "DELETE FROM runs WHERE rowid NOT IN (SELECT arg_max(rowid, archived) FROM runs GROUP BY id)"

_TOTALS = "SELECT count(*), min(date)::VARCHAR, max(date)::VARCHAR FROM runs"

_OUTCOMES = "SELECT outcome, count(*) FROM runs GROUP BY 1 ORDER BY 2 DESC, 1"

_HOSTS = """
SELECT r.host, count(DISTINCT r.gpu)::VARCHAR, sum(r.hours)
FROM (SELECT unnest(ranks) AS r FROM runs) GROUP BY 1
"""

_GPUS = """
SELECT r.gpu, concat_ws(', ', string_agg(DISTINCT r.host, ', '), any_value(r.name)), sum(r.hours)
FROM (SELECT unnest(ranks) AS r FROM runs) WHERE r.gpu IS NOT NULL GROUP BY 1
"""

_INCIDENTS = """
SELECT s.host, coalesce(s.gpu, ''), s.kind, job, date::VARCHAR, arg_max(run, row(began, id))
FROM (SELECT id, run, job, date, began, unnest(suspects) AS s FROM runs) GROUP BY ALL
"""

_CAUSES = f"""
SELECT cause, '', count(*), count(DISTINCT job), arg_max(run, row(began, id)) FROM runs WHERE cause IS NOT NULL
GROUP BY 1 ORDER BY 3 DESC, 1 LIMIT {MOST}
"""

_MODULES = f"""
SELECT regexp_replace(module, '\\d+', '*', 'g'), concat(module_class, ': ', cause), count(*), count(DISTINCT job),
    arg_max(run, row(began, id))
FROM runs WHERE cause IS NOT NULL GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT {MOST}
"""

_VERSIONS = f"""
SELECT torch, driver, rankwatch, count(*), count(cause), count_if(len(suspects) > 0) FROM runs
GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT {MOST}
"""


def ask(url: str, since: str = "0001-01-01", until: str = "9999-12-31") -> Fleet:
    """What the archive says of the runs that began on these days, but for files that are damaged.

    Raises:
        UsageError: there is no archive, or it cannot be read.
    """
    with _opened(url) as (database, files), _explained(url):
        names = [name for (name,) in database.execute("SELECT file FROM glob($files)", {"files": files}).fetchall()]
        if not names:
            raise UsageError(f"no archive at {shown(url)}: it has no files date=*/job=*/*.parquet")
        reader = _Reader(database, since, until)
        reader.read(names)
        if not reader.has_read:
            raise UsageError(shown(f"cannot read the archive {url}: {names[0]} is {DAMAGED} ({reader.why})"))
        database.execute(_ONCE)

        def rows(query: str) -> list[tuple[Any, ...]]:
            found: list[tuple[Any, ...]] = database.execute(query).fetchall()
            return found

        ((runs, first_day, last_day),) = rows(_TOTALS)
        incidents = [Suspicion(*row) for row in rows(_INCIDENTS)]
        hosts, gpus = attributed(
            machines_of([Hours(*row) for row in rows(_HOSTS)], incidents, of_gpus=False),
            machines_of([Hours(*row) for row in rows(_GPUS)], incidents, of_gpus=True),
            incidents,
        )
        return Fleet(
            url=shown(url),
            runs=runs,
            first_day=first_day or "",
            last_day=last_day or "",
            outcomes=dict(rows(_OUTCOMES)),
            hosts=hosts,
            gpus=gpus,
            causes=tuple(Recurring(*row) for row in rows(_CAUSES)),
            modules=tuple(Recurring(*row) for row in rows(_MODULES)),
            versions=tuple(Version(*row) for row in rows(_VERSIONS)),
            damaged=tuple(map(shown, reader.damaged)),
        )


class _Reader:
    """Reads files of an archive into the table ``runs``, but for those that are damaged.

    Attributes:
        why: what is wrong with the first of these.
    """

    def __init__(self, database: Any, since: str, until: str) -> None:
        self._database = database
        self._days = {"since": since, "until": until}
        self.damaged: list[str] = []
        self.why = ""
        self.has_read = False

    def read(self, files: Sequence[str]) -> None:
        """DuckDB does not always name the file that it cannot read, so it is looked for by halves."""
        into = "INSERT INTO runs" if self.has_read else "CREATE TABLE runs AS"
        try:
            self._database.execute(into + _READ, {**self._days, "files": [escape(file) for file in files]})
            self.has_read = True
        except duckdb.Error as error:
            if type(error) not in _OF_A_FILE:
                raise
            if len(files) > 1:
                self.read(files[: len(files) // 2])
                self.read(files[len(files) // 2 :])
                return
            self.damaged += files
            self.why = self.why or _line(error)


@contextmanager
def _opened(url: str) -> Iterator[tuple[Any, str]]:
    """A database in a file that is removed afterwards, and the names of the archive's files for it."""
    file_system, root = folder_at(url)
    with tempfile.TemporaryDirectory(prefix="rankwatch-fleet-") as folder:
        settings = {"memory_limit": MEMORY, "temp_directory": folder, "preserve_insertion_order": "false"}
        database = duckdb.connect(str(Path(folder) / "runs.db"), config=settings)
        try:
            database.execute(_NO_PROGRESS_BAR)
            files = f"{escape(root)}/date=*/job=*/*.parquet"
            if not is_local(file_system):
                database.register_filesystem(file_system)
                files = str(file_system.unstrip_protocol(files))
            yield database, files
        finally:
            database.close()


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Raises UsageError, in one line, where the archive cannot be read."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        raise UsageError(shown(f"cannot read the archive {url}: {_line(error)}")) from None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]  # the further lines are of the query
