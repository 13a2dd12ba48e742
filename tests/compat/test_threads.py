"""Training and evaluation as two threads: an error of the second ends both.

test_command_line.py has one that comes in training.
"""

import threading

import pytest

from jaxline.compat import threads


def test_an_error_of_the_evaluation_behind_the_last_step_is_raised():
  trained = threading.Event()

  def evaluate():
    assert trained.wait(10)
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    threads.run_both(lambda after_step: None, evaluate, trained)
