"""The pendulum of Gym's `Pendulum-v1`, as pure functions of JAX or NumPy.

A motor swings a pendulum up and balances it. The argument `np` is the array
library: `jax.numpy` in a compiled step, or NumPy on the host.

Shapes: E environments.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

STEPS = 200  # Every episode has this length.
_MAX_TORQUE, _MAX_SPEED, _GRAVITY, _SECONDS = 2.0, 8.0, 10.0, 0.05


class State(NamedTuple):
  """The state of the environments, arrays [E].

  Attributes:
    angle: in radians; 0 is upright.
    speed: in radians per second.
    time: the number of steps of the episode so far.
  """

  angle: Any
  speed: Any
  time: Any


def reset(uniform_E2: Any, np: Any = jnp) -> State:
  """Returns the first states of episodes, from random numbers in [-1, 1]."""
  angle_E, speed_E = np.pi * uniform_E2[:, 0], uniform_E2[:, 1]
  return State(angle_E, speed_E, np.zeros(len(angle_E), np.int32))


def observe(state: State, np: Any = jnp) -> Any:
  """Returns the observations of the agent, [E, 3]."""
  x = np.cos(state.angle), np.sin(state.angle), state.speed / _MAX_SPEED
  return np.stack(x, -1)


def advance(state: State, action_E: Any, np: Any = jnp) -> tuple[State, Any]:
  """Returns the next state and the rewards [E], at most 0.

  Actions are fractions of the largest torque, from -1 to 1.
  """
  torque = _MAX_TORQUE * action_E
  angle = (state.angle + np.pi) % (2 * np.pi) - np.pi
  reward_E = -(angle**2 + 0.1 * state.speed**2 + 0.001 * torque**2)
  change = 1.5 * _GRAVITY * np.sin(angle) + 3 * torque
  speed = np.clip(state.speed + _SECONDS * change, -_MAX_SPEED, _MAX_SPEED)
  return State(angle + _SECONDS * speed, speed, state.time + 1), reward_E


def transition(
  state: State, action_E: Any, uniform_E2: Any, np: Any = jnp
) -> tuple[State, dict[str, Any]]:
  """Returns the next state and the transition; restarts ended episodes."""
  after, reward_E = advance(state, action_E, np)
  seen = {
    'x': observe(state, np),
    'action': action_E,
    'reward': reward_E,
    'next_x': observe(after, np),
  }
  new, is_over_E = reset(uniform_E2, np), after.time >= STEPS
  pairs = zip(new, after, strict=True)
  return State(*(np.where(is_over_E, x, y) for x, y in pairs)), seen
