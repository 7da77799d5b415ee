"""A trained model that is asked: what it writes, how likely it finds something."""
