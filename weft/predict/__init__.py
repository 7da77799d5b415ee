"""What a run will need and how long it will take, from the code that will really run."""
