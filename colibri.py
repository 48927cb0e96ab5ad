"""colibri.py: run Mixture-of-Experts language models far larger than RAM. The door: settings -> snapshot -> mode.

    PROMPT="In the beginning" python colibri.py
    SNAP=/models/glm-5.2 PROMPT="..." python colibri.py [cap] [expert_bits] [dense_bits]

Exit code 0: done. 1: a check failed, or the numbers broke down. 2: bad usage or a bad snapshot, said in one line.
130: interrupted. 141: whoever read stdout went away. 143: terminated. A server that is told to end ends with 0.
"""

import sys

from machine.exit import exit_code
from settings import USAGE, Settings


def main(arguments):
    """Command-line arguments -> exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    return exit_code("colibri", lambda: run(Settings.read(arguments)))


def run(settings):
    """Open the snapshot and hand it to the mode the settings ask for."""
    # Imported here: torch takes a second or two, and a mistyped variable should not wait for it.
    from forward.finite import NonFinite
    from load.model import check_folder, open_snapshot
    from machine.console import Terminal, announce, say, say_warnings
    from modes.check import run_oracle
    from modes.reference import reference_path
    from modes.replay import run_replay
    from modes.report import check_report
    from modes.score import run_score
    from modes.serve import open_server, run_serve
    from modes.teacher_forcing import forward_all
    from modes.text import run_text

    if settings.score:
        mode = run_score
    elif settings.serve:
        mode = run_serve
    elif settings.prompt is not None:
        mode = run_text
    elif settings.replay:
        mode = run_replay
    else:
        mode = forward_all if settings.tf else run_oracle
    Terminal.has_bar = sys.stderr.isatty() and not settings.dumb
    Terminal.is_shared = sys.stderr.isatty() and sys.stdout.isatty()
    for notice in settings.notices:
        say(notice)
    check_report(settings)
    check_folder(settings)
    if mode is run_oracle and not settings.ref and not reference_path(settings).exists():
        print(USAGE, file=sys.stderr)
        return 2
    opened = open_server(settings) if mode is run_serve else open_snapshot(settings)
    announce(opened)
    say_warnings()
    try:
        return mode(settings, opened)  # which loads the weights once its own input is found good
    except NonFinite as error:
        say(f"colibri: {error}")
        return 1
    finally:
        opened.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
