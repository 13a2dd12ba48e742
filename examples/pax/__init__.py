"""Pax's way to write an experiment; see README.md."""

try:
  import fiddle  # noqa: F401
except ModuleNotFoundError as e:
  if e.name != 'fiddle':
    raise
  raise ModuleNotFoundError(
    "Pax's way to write an experiment needs Fiddle: pip install -e '.[pax]'.",
    name='fiddle',
  ) from e
