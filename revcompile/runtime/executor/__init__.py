"""Performs the action lists of stages: action by action, or as a captured step."""
