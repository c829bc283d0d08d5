"""Measurements of nanoscale; figures are kept in `results`."""
