"""Benchmarks: this project and others on the same work in one run, and the workloads they share."""
