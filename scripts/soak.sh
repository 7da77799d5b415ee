#!/usr/bin/env bash
# Train under faults for hours: kills at any moment, full disks, corrupted checkpoints, on 1 to 3
# ranks in turn; every run must end in the bits of one that nobody disturbed.
#   scripts/soak.sh [HOURS] [SEED]       ends with status 1 and the run's folder at the first failure
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m tests.soak "${1:-8}" "${2:-$RANDOM}"
