"""A chat in the terminal with the model of a snapshot.

    python scripts/chat_cli.py
    SNAP=/models/glm-5.2 NGEN=500 python scripts/chat_cli.py [cap] [expert_bits] [dense_bits]
    python scripts/chat_cli.py --prompt "Who art thou?"

Every line is a message. /clear forgets the conversation, /stats says how it went so far, /quit, /exit or Ctrl-D ends;
the slash may be left out. Ctrl-C stops the answer that is being given, and ends the chat where none is; when the model
is slow to stop, a second Ctrl-C ends the chat at once. stdin may be a file or a pipe. --prompt gives one answer, and
ends.

Arguments and variables are those of colibri.py (docs/env_vars.md), but for those that choose a mode. NGEN bounds each
answer, by default to 256 tokens. With THINK=1 the thoughts are shown, up to </think>. Answers go to stdout, a line end
after each; all else goes to stderr.

The messages are put into the snapshot's chat template anew for each answer, and of the tokens that come out only those
are read in that the model does not remember from the turns before. An answer that was cut off stays as it is, a message
like any other; a question stopped before its answer began is taken back. When less than NGEN tokens (at most a quarter
of CTX) would be left for an answer, the oldest turns are forgotten until the rest takes half of CTX: to forget them one
by one would mean to read everything in again each time. A message that does not fit CTX by itself is refused.

Exit codes are those of colibri.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from errors import Refused
from machine.exit import exit_code
from modes.chat import DEFAULT_NGEN, run, utf8
from settings import Settings


def main(arguments):
    """Command-line arguments -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("arguments", nargs="*", metavar="N", help="cap, expert_bits and dense_bits of colibri.py")
    parser.add_argument("--prompt", metavar="TEXT", help="one message: its answer, and the end")
    args = parser.parse_args(arguments)

    def work():
        settings = Settings.read(args.arguments, ngen=DEFAULT_NGEN)
        if args.prompt is not None and not args.prompt.strip():
            raise Refused("--prompt is empty; give it some text, or leave it out to chat")
        return run(settings, None if args.prompt is None else utf8(args.prompt, "--prompt"))

    return exit_code("chat", work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
