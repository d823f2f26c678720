"""The one error tree. A message names the subject, what was got, what was expected, and the remedy, in one line."""

from __future__ import annotations


class VlaStreamError(Exception):
    """Base of every error that this project raises on purpose."""


class InputError(VlaStreamError):
    """Bad input of a person: config, flag, file, URL. The command line prints it and exits with code 2."""


class NoSuchRun(InputError):
    """A run that is not on the server: never was, or not at the moment, while its launcher makes it anew there."""


class RunFailed(VlaStreamError):
    """A run that cannot go on. The command line prints it and exits with code 1."""


class Hopeless(RunFailed):
    """The same, where a worker that is started again would only fail in the same way once more."""


class PlayedInVain(RunFailed):
    """An evaluation whose episodes the server lost, as after a restart: it is to begin anew."""


class BadMessage(VlaStreamError):
    """Bytes from a stream, a pipe or a lane that do not decode: wrong schema, digest, shape, dtype or size."""


class PayloadUnreachable(VlaStreamError):
    """A payload reference that this process cannot open: another host, a vanished file, an expired blob."""


class PayloadElsewhere(PayloadUnreachable):
    """A payload in a /dev/shm that this process does not see: another process may well read it."""


class Expired(VlaStreamError):
    """A permit, lease or epoch that this process no longer holds; its work must be dropped."""


class EnvironmentFailed(VlaStreamError):
    """An environment hung, raised, died, or returned something its specification does not allow."""
