"""Experiments written with Pax's classes; see README.md."""

try:
  import fiddle  # noqa: F401
except ModuleNotFoundError as e:
  if e.name != 'fiddle':
    raise
  raise ModuleNotFoundError(
    "examples.pax needs Fiddle. Run: pip install -e '.[pax]'",
    name='fiddle',
  ) from e
