"""Going on when something goes wrong."""
