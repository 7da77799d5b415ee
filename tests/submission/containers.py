"""Stand-ins for Pyxis and Apptainer on a real Slurm.

Both run their program in a root directory of its own, with only the directories of the image and
the mounts that they are given, so a path that is not mounted does not exist there.  A SPANK plugin
(container.c) adds Pyxis's options to srun; the fake `apptainer` is a script.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.commands import SLEEPY
from tests.harness import ROOT

SCRIPT = Path(__file__).with_name("container.sh")
SOURCE = Path(__file__).with_name("container.c")

WEFT = """\
#!/bin/sh
[ -z "$PYTHONPATH" ] || exit 1  # of the host
PYTHONPATH=/opt/weft:{root} exec {python} -m weft "$@"
"""
APPTAINER = """\
#!/bin/bash
[ "$1" = exec ] || exit 1
mounts=
while shift; do
    case $1 in
        --nv) echo "no GPU" >&2; exit 1 ;;
        --bind) mounts=$2; shift ;;
        *) break ;;
    esac
done
image=$1
shift
root=$(mktemp -d)
exec unshare --mount bash -c '
    root=$1 image=$2 mounts=$3
    shift 3
    bash {script} "$root" "$image" "$mounts" home || exit 255
    readarray -t variables <"$image/opt/weft/environment"
    readarray -t kept < <(env | sed -n "s/^APPTAINERENV_//p")
    exec chroot "$root" env "${{variables[@]}}" "${{kept[@]}}" "$@"
' apptainer "$root" "$image" "$mounts" "$@"
"""


def build_plugin(directory: Path) -> str:
    """Compile the SPANK plugin; return its line of plugstack.conf, without 'required'."""
    plugin = directory / "container.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(plugin), str(SOURCE)]
    subprocess.run(command, check=True)
    return f"{plugin} {SCRIPT}"


def write_image(image: Path) -> None:
    """Write an image with weft, whose environment has PATH and GREETING."""
    home = image / "opt" / "weft"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "weft").write_text(WEFT.format(root=ROOT, python=sys.executable))
    (home / "bin" / "weft").chmod(0o755)
    (home / "sleepy.py").write_text(SLEEPY)
    (home / "environment").write_text(
        "PATH=/opt/weft/bin:/usr/bin:/bin\nGREETING=image\nPLACE=image\n"
    )
    system = ["/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc", "/proc", "/dev", "/sys"]
    prefixes = (str(ROOT), sys.prefix, sys.base_prefix)
    python = {path for prefix in prefixes for path in (prefix, os.path.realpath(prefix))}
    found = [*system, *sorted(path for path in python if not path.startswith("/usr"))]
    text = "".join(f"{path}\n" for path in found if Path(path).exists())
    (image / "directories").write_text(text)


def write_apptainer(bin: Path) -> None:
    """Write the fake `apptainer`."""
    (bin / "apptainer").write_text(APPTAINER.format(script=SCRIPT))
    (bin / "apptainer").chmod(0o755)
