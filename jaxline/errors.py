"""Errors that are printed as one line, without a traceback."""


class UsageError(ValueError):
  """The command line, the config or a file that it names is wrong.

  The message says what was got, what was expected and what to do, in one line.
  `platform.main` prints it alone and ends with code 2. Other errors keep their
  traceback.
  """


class MissingFileError(UsageError, FileNotFoundError):
  """A file that the config names is not there."""
