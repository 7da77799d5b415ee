"""What a run reports about itself: metrics, trackers, timelines, faults, heartbeats."""
