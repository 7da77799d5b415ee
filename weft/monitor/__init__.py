"""What a run tells: records and where they go."""
