"""DDPG on a pendulum, with an environment and a replay buffer that resume."""
