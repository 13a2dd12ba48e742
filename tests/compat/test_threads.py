"""Training and evaluation as two threads: an error of the second ends both."""

import threading

import pytest

from jaxline.compat import threads


@pytest.mark.parametrize('when', ['in training', 'behind its last step'])
def test_an_error_of_the_evaluation_ends_the_training(when):
  trained, failed = threading.Event(), threading.Event()

  def evaluate():
    if when != 'in training':
      assert trained.wait(10)
    failed.set()
    raise ZeroDivisionError

  def train(after_step):
    while when == 'in training':
      after_step()
      failed.wait(10)

  with pytest.raises(ZeroDivisionError):
    threads.run_both(train, evaluate, trained)
