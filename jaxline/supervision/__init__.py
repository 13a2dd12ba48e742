"""What ends a run before its last step: a signal, a hang, a NaN."""
