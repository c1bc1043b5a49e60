"""Measurements of autopar by itself: plan quality, planner speed, agreement with the plain model."""
