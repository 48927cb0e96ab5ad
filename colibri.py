"""colibri.py: run Mixture-of-Experts language models far larger than RAM. Settings -> snapshot -> mode.

    PROMPT="In the beginning" python colibri.py
    SNAP=/models/glm-5.2 PROMPT="..." python colibri.py [cap] [expert_bits] [dense_bits]

Exit code 0: done. 1: a check failed, a NaN came up, or a fault of the program. 2: bad usage or a bad snapshot, reported
in one line. 130: interrupted. 129, 143: SIGHUP, SIGTERM. 141: the reader of stdout went away. A server that is told to
end ends with 0.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
import machine.interpreter  # noqa: F401 - first: a Python that is too old, or without the packages, ends in one line

# isort: split
from errors import Refused
from machine.exit import exit_code, handled_by
from settings import USAGE, Settings


def main(arguments: list[str]) -> int:
    """-> exit code."""
    return exit_code("colibri", lambda: run_arguments(arguments))


def run_arguments(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    positional = [argument for argument in arguments if argument != "--tools"]
    return run(Settings.read(positional, tools="--tools" in arguments))


def run(settings: Settings) -> int:
    """Run the mode that the settings choose -> exit code."""
    # Imported here: torch takes a second or two, and a mistyped variable should be reported at once. Signals end the
    # program without Python meanwhile: imports lose an exception of a handler, or leave a package half loaded.
    with handled_by(signal.SIG_DFL):
        from load.model import open_snapshot
        from machine.console import say
        from modes.chat import run_chat
        from modes.check import run_check
        from modes.reference import reference_path
        from modes.replay import run_replay
        from modes.run import Mode, run_mode
        from modes.score import run_score
        from modes.serve import open_server, run_serve
        from modes.teacher_forcing import run_teacher_forcing
        from modes.text import run_text

    modes: tuple[tuple[object, Mode], ...] = (
        (settings.score, run_score),
        (settings.serve, run_serve),
        (settings.prompt, run_text),
        (settings.replay, run_replay),
        (settings.tf, run_teacher_forcing),
        (settings.is_chat and sys.stdin is not None and sys.stdin.isatty(), run_chat),
        (True, run_check),
    )
    mode = next(mode for is_chosen, mode in modes if is_chosen)
    if mode is run_check and not settings.ref and not reference_path(settings).exists():
        say(USAGE)
        return 2
    if settings.tools and mode is not run_chat:
        raise Refused("--tools: only a chat has tools; set CHAT=1 in a terminal and no other mode, or use chat_cli.py")
    return run_mode("colibri", settings, mode, open_server if mode is run_serve else open_snapshot)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
