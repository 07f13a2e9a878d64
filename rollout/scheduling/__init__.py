"""Scheduling: decides which tokens each step computes. It uses no torch and no clock."""
