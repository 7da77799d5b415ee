"""Commands on top of training: verify, compare, diff, generate, evaluate, convert."""
