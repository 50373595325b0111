"""The main job: asynchronous RL that learns, on this machine, against real engines."""
