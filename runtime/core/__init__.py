"""The controller: scheduler, planner, committer, block manager."""
