"""The exception tree. Every exception says what was wrong, where, and what to do; the tree maps to exit codes here alone."""

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_ABORTED = 77


class RankwatchError(Exception):
    """Anything rankwatch raises on purpose."""

    exit_code = EXIT_ERROR


class UsageError(RankwatchError, ValueError):
    """A bad option, address, folder or connection file: it stops before batch 0."""

    exit_code = EXIT_USAGE


class ConnectionFileError(UsageError):
    """A connection file that is missing, malformed, of another major version, or readable by others."""


class AddressError(UsageError):
    """An address that cannot be listened on: malformed, in use, or not of this machine."""


class ProtocolError(RankwatchError):
    """The other side sent what the wire format does not allow, or refused us: use the same release on both sides."""


class TrainingAborted(RankwatchError):
    """Raised in the training thread of every rank once the run is to stop; the text names the culprit."""

    exit_code = EXIT_ABORTED


class OverflowDetected(TrainingAborted, ValueError):
    """Raised on the rank whose frame broke the policy (a ValueError, as the Hugging Face detector's is)."""


class BatchLimitReached(TrainingAborted, ValueError):
    """Raised after the batch that ``abort_after_batch_num`` names, before its backward."""

    exit_code = EXIT_ERROR  # there is no verdict
