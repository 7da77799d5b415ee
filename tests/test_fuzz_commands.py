"""Random command lines: every command ends with a documented status and a clear message."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

from tests.command_fuzz import PATHS_SEED, draw, fuzz, leaves, make_inputs
from weft.cli.main import main
from weft.conversion.hf_convert import path_exists

FEW = 20
MANY = 1200


@pytest.fixture(scope="module")
def inputs(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("fuzz") / "inputs", store_path)


def test_draw_reaches_every_command() -> None:
    drawn = [tuple(draw(f"0 {number}").words) for number in range(600)]
    for path, _ in leaves():
        assert any(words[: len(path)] == path for words in drawn), path


@pytest.mark.timeout(300)
def test_command_of_random_words_ends_with_a_message(inputs: Path, tmp_path: Path) -> None:
    failures = fuzz(inputs, tmp_path / "fuzz", 0, FEW, bounded=True, limit=60)
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("bounded", [True, False])
def test_command_of_many_random_words_ends_with_a_message(
    bounded: bool, inputs: Path, tmp_path: Path
) -> None:
    seed = random.randrange(10**9)
    failures = fuzz(inputs, tmp_path / "fuzz", seed, MANY, bounded, limit=120)
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_command_with_a_hostile_path_ends_with_a_message(inputs: Path, tmp_path: Path) -> None:
    failures = fuzz(inputs, tmp_path / "fuzz", PATHS_SEED, 0, bounded=True, limit=60)
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("text", ["x" * 300, "s3://bucket/run"])
@pytest.mark.parametrize(
    "words", [["hang"], ["diff", "a"], ["report", "a", "--out"], ["data", "verify"], ["generate"]]
)
def test_path_that_cannot_be_opened_is_a_usage_error(
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if words == ["data", "verify"] and "://" in text:  # a store may be in a bucket
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        assert main([*words, text]) == 2
        assert "cannot be read" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit, match="2"):
        main([*words, text])
    assert f"{text!r} " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["recipe", "from"], ["doctor", "--logs"]])
@pytest.mark.parametrize("path", ["fifo", "/dev/zero"])
def test_path_of_a_pipe_or_device_is_a_usage_error(
    words: list[str],
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert main([*words, path]) == 2
    message = capsys.readouterr().err
    assert f'="{path}"' in message
    assert re.search("not a (regular )?file|a pipe to which nothing is written", message)


@pytest.mark.parametrize(
    "words", [["plan", "demo", "--report"], ["recipe", "from", "config.json", "-o"]]
)
def test_output_to_a_pipe_or_device_is_an_error_and_leaves_it(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert main([*words, "fifo"]) == 2
    assert '="fifo" is a pipe or a device. Name a file.' in capsys.readouterr().err
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "nothing://x"])
@pytest.mark.parametrize("words", [["import"], ["import", "."], ["export", "a"]])
def test_import_and_export_of_an_impossible_path_are_usage_errors(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, name, *["new"] * (words == ["import"])]
    try:
        status = main(words)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert json.dumps(name)[1:-1] in capsys.readouterr().err.replace("\\x00", "\\u0000")


@pytest.mark.parametrize("name", ["a\nb", "caf\udce9"])
def test_import_to_a_name_with_control_characters_is_an_error(
    name: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(inputs / "model"), str(tmp_path / name)]) == 2
    assert "has control characters, or bytes that are not UTF-8" in capsys.readouterr().err


def test_main_with_a_file_that_may_not_be_read_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: object, *args: object, **kwargs: object) -> os.stat_result:
        if str(path).endswith("job.toml"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)  # type: ignore[arg-type]

    stat = os.stat
    monkeypatch.setattr(os, "stat", refuse)
    assert main(["hang", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"weft: {tmp_path}/job.toml: permission denied\n"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["export", "RUN", "http://127.0.0.1:9/x"], "is a server that can only be read"),
        (["export", "RUN", "s3://"], "names no bucket"),
        (["train", "demo", "--dry-run", "--checkpoint.dir=s3://"], "names no bucket"),
        (["train", "demo", "--dry-run", "--checkpoint.dir=http://x/y"], "can only be read"),
    ],
)
def test_store_that_cannot_be_written_is_a_usage_error(
    words: list[str], rule: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([str(inputs / "run") if word == "RUN" else word for word in words])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert rule in capsys.readouterr().err


def test_export_to_a_store_without_credentials_names_the_reason(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(inputs))
    # A connection with the variables of an earlier test would be used again.
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    assert main(["export", str(inputs / "run"), "s3://bucket/without/credentials"]) == 2
    message = capsys.readouterr().err
    assert "s3://bucket/without/credentials cannot be reached: NoCredentialsError" in message
    assert "Unable to locate credentials" in message
    assert not path_exists(inputs / "new")
