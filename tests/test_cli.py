"""The command line: what it prints, how it answers mistakes, what it needs."""

import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import typer.main

import sharpmax
from sharpmax import cli, theory
from sharpmax.__main__ import main
from sharpmax.inputs import check_folder
from sharpmax.paper import EXHIBITS
from sharpmax.paper.max_retrieval import SHIPPED
from sharpmax.paper.published import GEMMA_SPREADS


@pytest.fixture
def command(capsys):
    """Runs a command line in this process: exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return run


def process(*arguments, before=""):
    """Runs a command line in a process of its own, after the Python statements ``before``."""
    code = f"import sys; {before}\nfrom sharpmax.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


BLOCK = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Blocker())
"""


def is_one_sentence(err):
    return err.startswith("sharpmax: ") and err.count("\n") == 1 and "Traceback" not in err and "╭" not in err


def test_bound_as_json(command):
    code, out, err = command("bound", "--spread", "5.69", "--theta", "1", "--epsilon", "0.01", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["n"]["paper"] == math.floor(math.exp(5.69) / 0.01) + 1
    assert report["n"]["attained"] == math.floor(1 + math.exp(5.69) * 99) + 1
    assert report["machine_epsilon_n"]["bfloat16"] == math.floor(math.exp(5.69) * 2**7) + 1
    assert [e["model"] for e in report["examples"]] == ["Gemma 2B", "Gemma 7B"]
    for example, published in zip(report["examples"], GEMMA_SPREADS, strict=True):
        for which in ("lowest", "average", "highest"):
            spread = getattr(published, which)
            assert example[which] == {"spread": spread, "n": theory.dispersion_length(spread, 0.01)._asdict()}


def test_bound_as_text(command):
    code, out, err = command("bound", "--spread", "3", "--epsilon", "0.1")
    lengths = theory.dispersion_length(3, 0.1)
    assert (code, err) == (0, "")
    assert f"{lengths.paper:,}" in out
    assert f"{lengths.attained:,}" in out
    assert "Gemma 2B" in out
    assert "5.69 ± 2.05" in out
    assert "the paper reports" in out


def test_bound_with_numbers_beyond_reading(command):
    code, out, _ = command("bound", "--spread", "3", "--theta", "0.005")
    assert code == 0
    assert "about " in out
    assert "over 10^300" in out  # 14.78 / 0.005
    code, out, _ = command("bound", "--spread", "3", "--theta", "0.005", "--json")
    assert json.loads(out)["examples"][0]["highest"]["n"] == {"paper": None, "attained": None}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bound", "--theta", "0"], "expected theta to be a finite number above 0, got 0.0"),
        (["bound", "--theta", "nan"], "theta"),
        (["bound", "--epsilon", "2"], "expected epsilon to be above 0 and at most 1, got 2.0"),
        (["bound", "--epsilon", "0"], "epsilon"),
        (["bound", "--spread", "-1"], "spread"),
        (["bound", "--spread", "1e12"], "expected spread / theta to be at most 700"),
        (["bound", "--spread", "wide"], "--spread"),
        (["bound", "--spread"], "--spread"),
        (["bound", "--width", "1"], "--width"),
        (["bound", "extra"], "extra"),
        (["bounds"], "expected one of bound, fit, compare, diagnose, zero-shot, train, models, clrs-text, reproduce"),
        (["--loud"], "--loud"),
        (["reproduce", "fig99"], "got 'fig99'"),
        (["reproduce", "fig99"], "failure, depth, all"),
        (["reproduce", "dispersion", "--theta", "-1"], "theta"),
        (["reproduce", "dispersion", "--seed", "-1"], "--seed"),
        (["reproduce", "table1", "--protocol", "blunt"], "expected a protocol to be one of paper, sharp"),
        (["reproduce", "table1", "--checkpoint", "nowhere"], "nowhere holds no checkpoint"),
        (["reproduce", "table1", "--sizes", "16,many"], "expected sizes to be different whole numbers"),
        (["reproduce", "table1", "--sizes", "16,16"], "got '16,16'"),
        (["reproduce", "table1", "--sizes", "1"], "from 2 to"),
        (["reproduce", "table1", "--sets", "0"], "--sets"),
        (["fit", "--checkpoint", "nowhere", "-o", "policy.json"], "nowhere holds no checkpoint"),
        (["fit", "--checkpoint", "nowhere", "-o", "policy.json", "--sizes", "-3"], "got '-3'"),
        (["fit", "--checkpoint", "nowhere", "-o", "policy.json", "--sets", "0"], "--sets"),
        (["fit", "--checkpoint", "nowhere"], "--output"),
        (["train", "max-retrieval"], "--out"),
        (["train", "max-retrieval", "--out", "OUT", "--protocol", "blunt"], "one of paper, sharp, or a JSON file"),
        (["train", "max-retrieval", "--out", "OUT", "--protocol", ""], "one of paper, sharp, or a JSON file, got ''"),
        (["train", "max-retrieval", "--out", "OUT", "--protocol", "."], "one of paper, sharp, or a JSON file, got '.'"),
        (["train", "max-retrieval", "--out", "OUT", "--steps", "0"], "--steps"),
        (["train", "max-retrieval", "--out", "OUT", "--steps", "3000000000"], "steps to be at most 2,147,483,647"),
        (["train", "max-retrieval", "--out", "OUT", "--seeds", "0"], "--seeds"),
        (["train", "max-retrieval", "--out", "OUT", "--seeds", "99999999999"], "--seeds"),
        (["reproduce", "table1", "--sets", "99999999999999"], "--sets"),
        (["reproduce", "fig6", "--sets", "99999999999999"], "--sets"),
        (["reproduce", "fig6", "--sizes", "1"], "from 2 to"),
        (["fit", "--checkpoint", "nowhere", "-o", "policy.json", "--sets", "99999999999"], "--sets"),
    ],
)
def test_bad_arguments_are_one_sentence_and_exit_code_2(command, arguments, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert is_one_sentence(err), err
    assert says in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command_line", [["reproduce", "table1"], ["fit", "-o", "policy.json"]])
def test_a_foreign_checkpoint(command, tmp_path, command_line):
    (tmp_path / "checkpoint.json").write_text('{"schema": "of another program"}')
    code, out, err = command(*command_line, "--checkpoint", str(tmp_path))
    assert (code, out) == (2, "")
    assert is_one_sentence(err), err
    assert "of another program" in err


def test_a_file_in_the_place_of_the_folder(command, tmp_path):
    (tmp_path / "taken").write_text("")
    code, _, err = command("reproduce", "fig5", "--out", str(tmp_path / "taken"))
    assert code == 2
    assert is_one_sentence(err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["reproduce", "fig5", "--out", "taken/x"],
        ["reproduce", "all", "--train", "--out", "taken/x"],
        ["train", "max-retrieval", "--out", "taken"],
        ["train", "max-retrieval", "--out", "taken/x"],
        ["fit", "--checkpoint", str(SHIPPED / "paper"), "-o", "taken/p.json"],
        ["reproduce", "fig5", "--out", "/proc/x/y"],
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(command, arguments, monkeypatch, tmp_path):
    from sharpmax.tasks import max_retrieval
    from sharpmax.tasks.max_retrieval import fitting

    def work(*_, **__):
        raise AssertionError("work was begun")

    for module, name in ((fitting, "fit"), (max_retrieval, "train")):
        monkeypatch.setattr(module, name, work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert is_one_sentence(err), err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_folder_is_tried_and_nothing_of_that_is_left(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    check_folder(tmp_path)
    assert tmp_path.is_dir()


def test_a_folder_that_cannot_be_made(command, monkeypatch):
    def refuse(self, out, **options):
        raise PermissionError(13, "Permission denied", "results")

    monkeypatch.setattr(type(EXHIBITS["fig5"]), "run", refuse)
    assert command("reproduce", "fig5") == (1, "", "sharpmax: Permission denied: results\n")


def test_ctrl_c(command, monkeypatch):
    def interrupt(self, out, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(EXHIBITS["fig5"]), "run", interrupt)
    assert command("reproduce", "fig5") == (130, "", "sharpmax: interrupted\n")


def test_a_defect_is_not_taken_for_bad_arguments(monkeypatch):
    def fail(self, out, **options):
        raise ValueError("a defect")

    monkeypatch.setattr(type(EXHIBITS["fig5"]), "run", fail)
    with pytest.raises(ValueError, match="a defect"):
        main(["reproduce", "fig5"])


def test_a_defect_in_training_is_not_taken_for_bad_arguments(monkeypatch, tmp_path):
    from sharpmax.tasks import max_retrieval

    def fail(*_, **__):
        raise ValueError("a defect")

    monkeypatch.setattr(max_retrieval, "train", fail)
    with pytest.raises(ValueError, match="a defect") as raised:
        main(["train", "max-retrieval", "--steps", "2", "--out", str(tmp_path / "heads")])
    assert type(raised.value) is ValueError


HEARING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from sharpmax.__main__ import command
command()
"""


@contextmanager
def started(*arguments, environment=None):
    """A process that hears SIGINT, even where this one ignores it, and that does not outlive a test that fails."""
    line, pipe = [sys.executable, "-c", HEARING, *arguments], subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment) as run:
        try:
            yield run
        finally:
            run.kill()


def test_ctrl_c_in_training_is_quick_and_keeps_what_was_done(tmp_path):
    from sharpmax.tasks.max_retrieval import Protocol, load_checkpoint

    Protocol(batch=2, sizes=(2, 3), steps=10**6).save(tmp_path / "p.json")
    arguments = ["train", "max-retrieval", "--protocol", str(tmp_path / "p.json"), "--seeds", "2"]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with started(*arguments, "--out", str(tmp_path / "heads"), environment=environment) as run:
        deadline = time.monotonic() + 120
        while not (tmp_path / "heads" / "checkpoint.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "Traceback" not in err
    assert 0 < load_checkpoint(tmp_path / "heads").step < 10**6


def test_exit_code_and_sentence_of_the_process():
    done = process("bound", "--theta", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert is_one_sentence(done.stderr)


@pytest.mark.parametrize("arguments", [["--help"], ["bound"], ["reproduce", "fig5"]])
def test_a_core_install_names_the_extra(arguments):
    done = process(*arguments, before=BLOCK.format(blocked={"typer", "rich", "matplotlib", "click"}))
    assert (done.returncode, done.stdout) == (1, "")
    assert is_one_sentence(done.stderr)
    assert "pip install 'sharpmax[experiments]'" in done.stderr


@pytest.mark.parametrize(("name", "package"), [("fig5", "matplotlib"), ("fig2", "jax"), ("table1", "jax")])
def test_figures_without_a_package_name_the_extra(tmp_path, name, package):
    done = process("reproduce", name, "--out", str(tmp_path), before=BLOCK.format(blocked={package}))
    assert (done.returncode, done.stdout) == (1, "")
    assert is_one_sentence(done.stderr)
    assert package in done.stderr
    assert "sharpmax[experiments]" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--help"], ["bound"], ["reproduce", "--help"]])
def test_commands_without_figures_import_no_matplotlib(arguments):
    done = process(*arguments, before=BLOCK.format(blocked={"matplotlib", "torch", "jax", "scipy"}))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_cannot_show_a_letter_is_served():
    done = process("bound", before="sys.stdout.reconfigure(encoding='ascii')")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["reproduce"]])
def test_no_command_prints_help(command, arguments):
    code, out, err = command(*arguments)
    assert (code, err) == (0, "")
    assert out.strip() == command(*arguments, "--help")[1].strip()


def test_help_of_every_command(command):
    for path in _paths(typer.main.get_command(cli.app)):
        code, out, err = command(*path, "--help")
        assert (code, err) == (0, "")
        assert "Usage: sharpmax" in out


def _paths(group, prefix=()):
    yield prefix
    for name, child in getattr(group, "commands", {}).items():
        yield from _paths(child, (*prefix, name))


def test_every_exhibit_has_a_command_and_a_module():
    paths = [list(path) for path in _paths(typer.main.get_command(cli.app))]
    assert {path[1] for path in paths if len(path) == 2 and path[0] == "reproduce"} == {
        *(exhibit.command for exhibit in EXHIBITS.values()),
        "all",
    }
    for name in EXHIBITS:
        assert importlib.util.find_spec(f"sharpmax.paper.{name}")


def test_options_of_figure_6_reach_it(command, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(type(EXHIBITS["fig6"]), "run", lambda self, out, **options: asked.append(options) or [])
    assert command("reproduce", "fig6", "--sets", "3", "--sizes", "16,32", "--out", str(tmp_path))[0] == 0
    assert (asked[0]["sets"], asked[0]["sizes"]) == (3, "16,32")


def test_the_folder_of_reports_is_not_that_of_the_committed_results():
    assert cli.groups.DEFAULT_OUT.name == "report"


def test_version(command):
    assert command("--version") == (0, f"sharpmax {sharpmax.__version__}\n", "")


@pytest.fixture
def made(monkeypatch):
    """What exhibits are asked for, none of which is made: name, protocol and checkpoint."""
    asked = []

    def run(self, out, protocol=None, checkpoint=None, **options):
        asked.append((self.name, protocol, checkpoint))
        return [out / self.name]

    monkeypatch.setattr(type(EXHIBITS["fig5"]), "run", run)
    return asked


def test_reproduce_all(command, tmp_path, made):
    code, out, _ = command("reproduce", "all", "--out", str(tmp_path))
    wanted = [(exhibit.name, protocol) for exhibit in EXHIBITS.values() for protocol in exhibit.heads or (None,)]
    assert (code, [asked[:2] for asked in made]) == (0, wanted)
    assert ("table1", "sharp") in wanted
    paths = [line for line in out.splitlines() if "left out" not in line]
    assert paths == [str(tmp_path / name) for name, _ in wanted] + [str(tmp_path / "index.html")]
    assert "Not made" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_reproduce_all_with_newly_trained_heads(command, tmp_path, made, monkeypatch):
    from sharpmax.tasks import max_retrieval

    train = max_retrieval.train

    def shortly(protocol, seeds, out, **options):
        return train(dataclasses.replace(protocol, steps=2), list(seeds)[:2], out, **options)

    monkeypatch.setattr(max_retrieval, "train", shortly)
    code, out, _ = command("reproduce", "all", "--train", "--out", str(tmp_path))
    assert code == 0
    assert "after 2 steps" in out
    folders = {protocol: tmp_path / "checkpoints" / protocol for protocol in ("paper", "sharp")}
    assert all(checkpoint == folders.get(protocol) for _, protocol, checkpoint in made)
    for protocol, folder in folders.items():
        assert max_retrieval.load_checkpoint(folder).protocol.schedule == max_retrieval.PRESETS[protocol].schedule


def test_an_interrupt_says_what_is_saved_and_ends_at_once(tmp_path):
    arguments = ["train", "max-retrieval", "--seeds", "1", "--steps", "100000", "--out", str(tmp_path / "heads")]
    with started(*arguments) as run:
        while not (tmp_path / "heads").exists():
            assert run.poll() is None
            time.sleep(0.1)
        time.sleep(1)  # it compiles
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "is saved" in err
    assert "the same command goes on from there" in err
    assert err.endswith("sharpmax: interrupted\n")


def test_a_page_that_is_there_is_made_anew_with_an_exhibit(command, tmp_path, made):
    assert command("reproduce", "fig5", "--out", str(tmp_path))[0] == 0
    assert not (tmp_path / "index.html").exists()
    (tmp_path / "index.html").write_text("old")
    assert command("reproduce", "fig5", "--out", str(tmp_path))[0] == 0
    assert "Not made" in (tmp_path / "index.html").read_text(encoding="utf-8")
