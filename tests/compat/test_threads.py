"""Training and evaluation as two threads: an error of either ends both."""

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


def test_an_error_of_the_training_ends_the_evaluation():
  trained, ended = threading.Event(), threading.Event()

  def evaluate():
    if trained.wait(10):
      ended.set()

  with pytest.raises(ZeroDivisionError):
    threads.run_both(lambda after_step: 1 / 0, evaluate, trained)
  assert ended.wait(10)
