"""Lustre and FSx: stripes of checkpoints, and files that are still in S3.

*Stripes.*  Lustre stores a file on as many object storage targets (OSTs) as its layout says.  A new
file inherits the layout of its directory.  With one stripe, one OST limits the speed of a file.  A
*progressive* layout has more stripes further in the file: small files stay on one OST, and large
ones use many.  A file system of FSx has one since August 2023; older ones have one stripe.

*Hydration.*  A file system that is linked to a bucket has the names of the objects, and loads the
contents of a file at its first read (hierarchical storage management, HSM).  A program that reads
one file after another waits for each.  `hydrate` asks for all of them at once.

Everything here uses ``lfs``, the tool of Lustre's client, and works without it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from threading import Thread

from weft.config.errors import InvalidConfig
from weft.config.files import expand_path
from weft.config.formatting import display_path
from weft.config.locks import unwritable_error
from weft.config.mounts import find_mount
from weft.config.schema import DataSection
from weft.config.storage import is_remote
from weft.data.prepared_cache import VERIFYING_MESSAGE, WAITING_MESSAGE, Progress, Report
from weft.data.source import detect_source
from weft.monitor.process import run_with_limit

LFS_TIMEOUT_SECONDS = 60.0
# Ends of the components and their stripes: the default of FSx for Lustre since 2023-08-25.
LAYOUT = (("100M", 1), ("10G", 8), ("100G", 16), ("-1", 32))
FILES_PER_CALL = 256  # of lfs: the arguments of a process have a limit of about 2 MB
RELEASED = 0x4  # flag of HSM: only the bucket has the contents
Log = Callable[[str], object]


def run_lfs(*arguments: str | Path) -> str | None:
    """Return the output of ``lfs``; None: it is missing, or failed without any output."""
    command = ["lfs", *map(str, arguments)]
    status, output = run_with_limit(command, LFS_TIMEOUT_SECONDS, "surrogateescape")
    return output if output or status == 0 else None


# --------------------------------------------------------------------------- stripes


def parse_layout(text: str) -> list[int]:
    """Return the stripes of each component in the output of ``lfs getstripe``.

    A layout that is not composite has one component.  -1: all OSTs; 0: the default, or data on the
    metadata target.
    """
    return [int(count) for count in re.findall(r"stripe_count:\s*(?:\(\w+\)\s*)?(-?\d+)", text)]


def has_one_stripe(layout: Sequence[int]) -> bool:
    """Return True if files of any size have one stripe."""
    return len(layout) == 1 and layout[0] in (0, 1)


def count_osts(text: str) -> int:
    """Return the number of OSTs in the output of ``lfs df``."""
    return len(set(re.findall(r"\[OST:(\d+)\]\s*$", text, re.MULTILINE)))


def layout_arguments(num_osts: int) -> list[str]:
    """Return the arguments of ``lfs setstripe`` for `LAYOUT`, bounded by the OSTs."""
    bounded = [(end, min(stripes, num_osts)) for end, stripes in LAYOUT]
    # Components with the same stripes are one, which ends where the last of them ends.
    ends = [list(part)[-1][0] for _, part in groupby(bounded, key=lambda part: part[1])]
    counts = sorted({stripes for _, stripes in bounded})
    pairs = zip(ends, counts, strict=True)
    return [word for end, stripes in pairs for word in ("-E", end, "-c", str(stripes))]


def create_checkpoint_dir(directory: Path, log: Log) -> None:
    """Create the directory of a run's checkpoints on Lustre, striped for large files.

    An existing directory keeps its layout, and so does one that inherits several stripes.  Of
    several nodes, the one that creates the directory sets the layout.

    Args:
        directory: directory of the checkpoints.
        log: receives a line that says what was done, or what the user can do.

    Raises:
        WeftError: if the directory cannot be created.
    """
    if is_remote(directory) or directory.exists() or not find_mount(directory).is_lustre:
        return
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return
    except OSError as error:
        raise unwritable_error(directory, error) from error
    log(f"{display_path(directory)} is on Lustre: {_set_layout(directory)}")


def _set_layout(directory: Path) -> str:
    """Set the layout of a new directory, unless it has one; return what was done."""
    if shutil.which("lfs") is None:
        return (
            "lfs is not installed, so its stripes are unknown. If large checkpoints are slow, "
            "install lustre-client, and see docs/fsx.md"
        )
    layout = parse_layout(run_lfs("getstripe", "-d", directory) or "")
    if not layout:
        return "lfs getstripe does not show its layout, which weft leaves unchanged"
    if not has_one_stripe(layout):
        return f"it keeps its default layout ({describe_layout(layout)})"
    num_osts = count_osts(run_lfs("df", directory) or "")
    if num_osts < 2:
        return f"it keeps one stripe, because lfs df shows {num_osts} OSTs"
    arguments = layout_arguments(num_osts)
    if run_lfs("setstripe", *arguments, directory) is None:
        return f"lfs setstripe {' '.join(arguments)} failed, so each file has one stripe"
    return f"set a progressive layout of 1 to {arguments[-1]} stripes (lfs setstripe -d removes it)"


def describe_layout(layout: Sequence[int]) -> str:
    """Describe the stripes of a layout: 'progressive: 1, 8, 16, 32 stripes'."""
    counts = ", ".join("all" if count == -1 else str(count) for count in layout)
    kind = "progressive: " if len(layout) > 1 else ""
    return f"{kind}{counts} stripe{'s' * (counts != '1')}"


# --------------------------------------------------------------------------- hydration


def parse_released(text: str, files: Iterable[str]) -> list[str]:
    """Return the files that ``lfs hsm_state`` shows as released."""
    states = re.findall(r"^(.*): \((0x[0-9a-fA-F]+)\)", text, re.MULTILINE)
    released = {name for name, flags in states if int(flags, 16) & RELEASED}
    return [file for file in files if file in released]


def find_released(files: Iterable[str]) -> Iterator[list[str]]:
    """Yield the released files of each `FILES_PER_CALL` files."""
    remaining = iter(files)
    while batch := list(islice(remaining, FILES_PER_CALL)):
        yield parse_released(run_lfs("hsm_state", *batch) or "", batch)


def list_lustre_files(locations: Iterable[str]) -> Iterator[str]:
    """Yield the files of locations on Lustre; skip all other locations."""
    is_lustre = cache(lambda directory: find_mount(directory).is_lustre)
    for location in locations:
        path = expand_path(location).absolute()
        is_file = path.is_file()
        if "://" in location or not is_lustre(path.parent if is_file else path):
            continue
        if is_file:
            yield str(path)
            continue
        with suppress(InvalidConfig):  # the function that reads it reports the error
            yield from (file.path for file in detect_source(str(path)).files)


def count_released(locations: Iterable[str], limit: int) -> tuple[int, int]:
    """Return the numbers of released and of examined files, of at most ``limit``."""
    if shutil.which("lfs") is None:
        return 0, 0
    files = list(islice(list_lustre_files(locations), limit))
    return sum(map(len, find_released(files))), len(files)


def hydrate(locations: Iterable[str], log: Log) -> None:
    """Ask Lustre to load the files whose contents are only in S3.

    Args:
        locations: files, directories and globs.
        log: receives a line with the number of files, if there are any.
    """
    num_files = num_bytes = 0
    for released in find_released(list_lustre_files(locations)):
        if released and run_lfs("hsm_restore", *released) is not None:
            num_files += len(released)
            num_bytes += sum(Path(file).stat().st_size for file in released)
    if num_files:
        size = f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes:,} bytes"
        log(f"asked Lustre to load {num_files:,} files ({size}) from S3, ahead of reading them")


def hydrate_ahead(locations: Iterable[str], log: Log) -> None:
    """Call `hydrate` in a thread, without waiting, if there is ``lfs``."""
    if shutil.which("lfs") is not None:
        Thread(target=hydrate, args=(list(locations), log), daemon=True).start()


def hydrate_when_reading(section: DataSection, report: Report, log: Log) -> Report:
    """Return a progress callback that hydrates the data as soon as weft reads them.

    The callback is called only if the data must be prepared, so prepared data stay in S3.
    """
    is_started = False

    def on_progress(progress: Progress) -> None:
        nonlocal is_started
        if not is_started and progress.message not in (WAITING_MESSAGE, VERIFYING_MESSAGE):
            is_started = True
            hydrate_ahead(filter(None, (*section.sources, section.validation_path)), log)
        report(progress)

    return on_progress
