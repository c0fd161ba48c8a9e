"""Proves what every pass must keep, of graphs and of windows."""
