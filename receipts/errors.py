"""Every error this project raises.

HarnessError
  InputError             what we were given is wrong (exit code 2)
    SnapshotError        a model folder cannot be used
    GgufError            a GGUF file cannot be used
    PlanError            token calls cannot be run
    PolicyError          a policy file cannot be used
    ReceiptFormatError   a receipt does not have its schema's form
    CanonicalError       a value has no canonical bytes
    OutputError          the place to write to cannot be used
  IntegrityError         bytes differ from what was promised (exit code 2)
    DigestMismatchError
    MissingFileError
    UnexpectedFileError
  NumericError           an array cannot be used
    ShapeError
    DtypeError
    NonFiniteError
    PrecisionError       the device does not compute in the precision promised
  EngineError            a peer or the teacher could not run
    EngineMissingError   an engine is not installed
    EngineFailedError    an engine refused a file or stopped
  SessionError           a session was used out of order or is poisoned

A gate that fails is a result and not an error: see `receipts.verdict`.
"""

from __future__ import annotations


class HarnessError(Exception):
    """Root of all errors; `facts` holds what the sentence says, for machines.

    Attributes:
        facts: subject, expected, actual and place, as far as each is known.
    """

    def __init__(self, sentence: str, **facts: object) -> None:
        super().__init__(sentence)
        self.facts = facts


class InputError(HarnessError):
    """What we were given is wrong."""


class SnapshotError(InputError):
    """A model folder cannot be used."""


class GgufError(InputError):
    """A GGUF file cannot be used."""


class PlanError(InputError):
    """Token calls cannot be run."""


class PolicyError(InputError):
    """A policy file cannot be used."""


class ReceiptFormatError(InputError):
    """A receipt does not have the form its schema asks for."""


class CanonicalError(InputError):
    """A value has no canonical bytes, or bytes are not canonical."""


class OutputError(InputError):
    """The place to write to cannot be used."""


class IntegrityError(HarnessError):
    """Bytes differ from what was promised."""


class DigestMismatchError(IntegrityError):
    """A digest differs from the recorded one."""


class MissingFileError(IntegrityError):
    """A promised file is absent."""


class UnexpectedFileError(IntegrityError):
    """A file is present that no record names."""


class NumericError(HarnessError):
    """An array cannot be used."""


class ShapeError(NumericError):
    """An axis has another size than promised."""


class DtypeError(NumericError):
    """An array has another element type than promised."""


class NonFiniteError(NumericError):
    """An array holds NaN or infinity."""


class PrecisionError(NumericError):
    """The device computes in a lower precision than promised."""


class EngineError(HarnessError):
    """A peer or the teacher could not run."""


class EngineMissingError(EngineError):
    """An engine is not installed."""


class EngineFailedError(EngineError):
    """An engine refused its input or stopped."""


class SessionError(HarnessError):
    """A session was used out of order, or is poisoned by an earlier failure."""
