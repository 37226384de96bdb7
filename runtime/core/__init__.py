"""The controller: step loop, scheduler, planner, block manager."""
