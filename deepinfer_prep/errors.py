"""Every error that this package raises on purpose.

A message is one or more whole sentences for the person who has to act: which file and tensor, what was
expected, what was found, and what to do.
"""


class PrepError(Exception):
    """Base of all errors raised on purpose; commands print its message and exit with status 1."""


class ContainerError(PrepError):
    """A file is not a well-formed safetensors file."""


class CheckpointError(PrepError):
    """A folder of files is not a consistent checkpoint."""


class RefusedError(PrepError):
    """The plan stands against the safety rules: nothing was written.

    `reasons` holds every refusal, each a whole sentence.
    """

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        super().__init__("\n".join(reasons))


class ConversionError(PrepError):
    """Writing the output failed or was interrupted; a new run with the same arguments resumes it."""


class ManifestError(PrepError):
    """A folder is not a finished output of this tool, or not one that this version can read."""


class NeuronUnavailableError(PrepError):
    """A Neuron package is absent, or is the empty placeholder that raises on import."""
