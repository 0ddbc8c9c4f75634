"""Problems of reasoning-gym as a problem set: `gym:TASK?parameter=value`."""
