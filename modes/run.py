"""run_mode: open the snapshot, announce what will run, run one mode. Used by every program that loads a model."""

from collections.abc import Callable
from dataclasses import replace

from forward.finite import NonFinite
from load.model import OpenedSnapshot, open_snapshot
from machine.console import check_stdout, say, say_warnings, set_up_terminal
from modes.report import check_report
from settings import Settings
from snapshot.folder import snapshot_name

Mode = Callable[[Settings, OpenedSnapshot], int]
Opener = Callable[[Settings], OpenedSnapshot]
MODE_SETTINGS = ("prompt", "score", "serve", "ref", "replay", "tf", "report")


def run_mode(program: str, settings: Settings, mode: Mode, open_for: Opener = open_snapshot) -> int:
    """-> the exit code of `mode`, which loads the weights once its own input is checked; 1 for a NaN or infinity.

    program: the name that begins the line of that error. open_for: opens the snapshot, planned for this mode.
    """
    set_up_terminal(settings.dumb)
    if settings.serve != "1":
        check_stdout()
    for notice in settings.notices:
        say(notice)
    check_report(settings)
    opened = open_for(settings)
    try:
        announce(opened)
        say_warnings()
        return mode(settings, opened)
    except NonFinite as error:
        say(f"{program}: {error}")
        return 1
    finally:
        opened.close()


def announce(opened: OpenedSnapshot) -> None:
    """Print what will be loaded and how: the first lines of every mode."""
    config = opened.config
    say(
        f"[snapshot] {snapshot_name(opened.folder.resolve())}: {config.model_type}, {config.num_layers} layers, "
        f"{config.num_experts} experts top-{config.num_active_experts}"
    )
    for line in (*opened.plan.lines(), *opened.notices):
        say(line)


def without_mode(settings: Settings, program: str, has_report: bool = False) -> Settings:
    """The settings of a program that has one mode: those that choose another are unset, and a notice names each."""
    kept = settings.report if has_report else None
    ignored = [name for name in MODE_SETTINGS if getattr(settings, name) not in (None, False)]
    ignored = [name for name in ignored if name != "report" or not has_report]
    notices = tuple(f"[env] {name.upper()} has no effect on {program}: ignored" for name in ignored)
    settings = replace(settings, notices=settings.notices + notices)
    return replace(settings, prompt=None, score=None, serve=None, ref=None, replay=False, tf=False, report=kept)
