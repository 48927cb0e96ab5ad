"""Chat in the terminal with the model of a snapshot.

    python scripts/chat_cli.py
    SNAP=/models/glm-5.2 NGEN=500 python scripts/chat_cli.py [cap] [expert_bits] [dense_bits]
    python scripts/chat_cli.py -p "Who art thou?" -t 0.6 -k 50

Every line is a message. /clear starts a new conversation, /stats shows statistics, /quit, /exit or Ctrl-D ends; the
slash may be left out. Ctrl-C stops the answer that is being generated, and ends the chat where there is none; when the
model is slow to stop, a second Ctrl-C ends the chat at once. stdin may be a file or a pipe. -p (--prompt) gives one
answer, and ends. In a terminal CHAT=1 python colibri.py is the same chat.

Arguments and variables are those of colibri.py (docs/env_vars.md), except those that choose a mode. -t is TEMP, and -k
samples from the k likeliest tokens alone, of which NUCLEUS (0.9) keeps the likelier part. NGEN bounds each answer, by
default to 256 tokens. With THINK=1 the reasoning is shown, up to </think>. Answers go to stdout, a line end after
each; all else goes to stderr.

For each answer the messages are rendered anew with the snapshot's chat template, and only the tokens behind the prefix
that the KV cache already holds are prefilled; answers stand in the prompt with the token ids that the model gave. An
answer that was cut off stays in the conversation as it is; a question stopped before its answer began is removed. When
less than NGEN tokens (at most a quarter of CTX) would be left for an answer, the oldest turns are forgotten until the
rest takes half of CTX: dropping them one by one would mean a full prefill each time. A message that does not fit CTX
by itself is refused.

--tools lets the model call a calculator and python between <|python_start|> and <|python_end|> (modes/chat_tools.py); a
model whose tokenizer lacks these markers is refused. Its programs run behind walls or not at all (docs/sandbox.md).

Exit codes are those of colibri.py.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from errors import Refused
from machine.exit import exit_code
from modes.chat import run_chat, utf8
from modes.run import run_mode, without_mode
from scripts.options import OneLineParser, number_from, whole_from
from settings import CHAT_NGEN, Settings


def main(arguments: list[str]) -> int:
    """-> exit code."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("arguments", nargs="*", metavar="N", help="cap, expert_bits and dense_bits of colibri.py")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="one message: its answer, and the end")
    parser.add_argument("-t", "--temperature", type=number_from(0), metavar="T", help="0 is greedy; by default TEMP")
    parser.add_argument("-k", "--top-k", type=whole_from(0), default=0, metavar="K", help="0 is all of them")
    parser.add_argument("--tools", action="store_true", help="let the model call a calculator and python")

    def run() -> int:
        args = parser.parse_args(arguments)
        settings = Settings.read(args.arguments, ngen=CHAT_NGEN, tools=args.tools)
        settings = without_mode(settings, "a chat", has_report=True)
        settings = replace(settings, top_k=args.top_k)
        if args.temperature is not None:
            settings = replace(settings, temp=args.temperature)
        if args.prompt is not None and not args.prompt.strip():
            raise Refused("--prompt is empty; give it some text, or leave it out to chat")
        message = None if args.prompt is None else utf8(args.prompt, "--prompt")
        return run_mode("chat", settings, lambda settings, opened: run_chat(settings, opened, message))

    return exit_code("chat", run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
