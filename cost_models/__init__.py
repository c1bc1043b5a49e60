"""Every second and every byte that the planner believes: hardware, operators, collectives, memory."""
