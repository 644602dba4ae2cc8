"""The exceptions and their exit codes. Each exception says what was wrong, where, and what to do."""

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_ABORTED = 77


class RankwatchError(Exception):
    """The base of all exceptions that rankwatch raises on purpose."""

    exit_code = EXIT_ERROR


class UsageError(RankwatchError, ValueError):
    """A bad option, address, folder or connection file, found before batch 0."""

    exit_code = EXIT_USAGE


class ConnectionFileError(UsageError):
    """A connection file that is missing, malformed, of another major version, or readable by others."""


class AddressError(UsageError):
    """The collector cannot listen on an address: it is malformed, in use, or not of this machine."""


class ProtocolError(RankwatchError):
    """The other side sent what the wire format does not allow, or refused this side: use the same release on both."""


class TrainingAborted(RankwatchError):
    """Raised in the training thread of every rank when the run stops; the text names the culprit.

    Attributes:
        rank: the rank that the verdict names; None: no single one, or the run was stopped for another reason.
        batch: the batch in which it went bad; None without a verdict. So are the following ones.
        module: the name of the module; empty: the root.
        cause: one word, as in the report.
        report: the run's folder, which has the report, on the collector's host; None without a collector.
    """

    exit_code = EXIT_ABORTED

    def __init__(
        self,
        text: str = "",
        *,
        rank: int | None = None,
        batch: int | None = None,
        module: str | None = None,
        cause: str | None = None,
        report: str | None = None,
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.batch = batch
        self.module = module
        self.cause = cause
        self.report = report


class OverflowDetected(TrainingAborted, ValueError):
    """Raised on the culprit rank. A ValueError, as in the Hugging Face detector."""


class BatchLimitReached(TrainingAborted, ValueError):
    """Raised after the batch that ``abort_after_batch_num`` names, before its backward."""

    exit_code = EXIT_ERROR  # there is no verdict
