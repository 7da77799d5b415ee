"""Comparing what layouts and recipes compute."""
