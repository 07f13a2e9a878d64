"""Scheduling: which tokens run next. It uses no torch and no clock."""
