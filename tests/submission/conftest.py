"""Fixtures of tests that start weft's command."""

from tests.commands import arguments as arguments
from tests.commands import finished as finished
from tests.commands import no_processes_left as no_processes_left
