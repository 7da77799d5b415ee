"""Metrics, trackers, timelines, anomaly detection, fault injection and heartbeats."""
