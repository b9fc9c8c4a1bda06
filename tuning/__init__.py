"""Finds the fastest correct config by measuring, and writes it down: a dispatch table, a kernel package, a report."""
