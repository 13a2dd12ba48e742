"""DDPG on a pendulum: an environment and a replay buffer that resume."""
