"""Run lm_eval (the evaluation harness) on any snapshot, without a server: multiple choice, perplexity, generation.

    python scripts/lm_eval_model.py --tasks arc_easy,hellaswag --limit 50
    SNAP=/models/glm-5.2-int4 RAM_GB=25 python scripts/lm_eval_model.py --tasks gsm8k --apply_chat_template 0 4 8
    python scripts/lm_eval_model.py --tasks colibri_choice,colibri_write --include_path tests/fixtures/lm_eval

Tasks are lm_eval's own (`lm_eval ls tasks` lists them; most download their data), or those of --include_path.
Arguments and variables are those of colibri.py, except those that choose a mode: CTX bounds a request, a longer one is
truncated on the left with a notice; KV_SLOTS answers are generated at a time; PREFIX=0 leaves out the family's prefix;
THINK=1 asks the chat template for reasoning. Log-likelihoods are those of SCORE.

stdout gets lm_eval's table, and as its last line JSON with every number; exit codes are those of colibri.py. Needs
`pip install -c constraints.txt -e .[lm_eval]`.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from dev.evaluation import Evaluation, EvaluationOptions
from errors import Refused
from load.model import OpenedSnapshot, load_model, snapshot_folder
from machine.console import say
from machine.exit import exit_code
from modes.run import run_mode, without_mode
from modes.serve import open_server
from scripts.options import OneLineParser, whole_from
from settings import Settings
from snapshot.folder import snapshot_name


def make_lm(evaluation: Evaluation, name: str) -> Any:
    """Wrap an Evaluation as a model of lm_eval."""
    from lm_eval.api.model import LM

    class SnapshotLM(LM):
        """A request holds its arguments in `args`; results are in the order of the requests."""

        tokenizer_name = name

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return evaluation.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return evaluation.loglikelihood_rolling([text for (text,) in (request.args for request in requests)])

        def generate_until(self, requests: list[Any]) -> list[str]:
            pairs = (request.args for request in requests)
            return evaluation.generate([(context, EvaluationOptions.read(kwargs)) for context, kwargs in pairs])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return evaluation.render_chat(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: Any = False) -> str:
            return (chat_template and evaluation.tokenizer.chat_template) or ""

    return SnapshotLM()


def find_tasks(names: list[str], include_path: str | None) -> Any:
    """-> a TaskManager of lm_eval that knows all of `names`.

    lm_eval's own thousands of tasks take seconds to read: only where the folder does not have the names.
    """
    from lm_eval.tasks import TaskManager

    if include_path:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(manager.match_tasks([name]) for name in names):
            return manager
    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise Refused(f"--tasks: lm_eval has no {', '.join(unknown)}; --include_path names a folder with more")
    return manager


def evaluate(args: argparse.Namespace) -> int:
    """-> exit code."""
    if importlib.util.find_spec("lm_eval") is None:
        raise Refused("lm_eval is not installed: pip install -c constraints.txt -e .[lm_eval]")
    settings = without_mode(Settings.read(args.sizes), "an evaluation")
    if args.include_path and not Path(args.include_path).is_dir():
        raise Refused(f"--include_path {args.include_path}: no such folder")
    snapshot_folder(settings)
    tasks = [name for name in args.tasks.split(",") if name]
    manager = find_tasks(tasks, args.include_path)

    def mode(settings: Settings, opened: OpenedSnapshot) -> int:
        evaluation = Evaluation(settings, opened)
        loaded = load_model(settings, opened)
        say(loaded.kernels)
        evaluation.load(loaded)
        return run_tasks(evaluation, opened, tasks, manager, args)

    return run_mode("lm_eval_model", settings, mode, open_server)


def run_tasks(
    evaluation: Evaluation, opened: OpenedSnapshot, tasks: list[str], manager: Any, args: argparse.Namespace
) -> int:
    """Print lm_eval's table, and as JSON every metric of every task and the options of the run -> exit code."""
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    started, name = time.perf_counter(), snapshot_name(opened.folder.resolve())
    results = simple_evaluate(
        model=make_lm(evaluation, name),
        tasks=tasks,
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
        log_samples=False,
    )
    seconds = time.perf_counter() - started
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    metrics_of_task = {
        task: {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in results["results"].items()
    }
    numbers = {
        "model": name,
        "tasks": metrics_of_task,
        "versions": results["versions"],
        "n_shot": results["n-shot"],
        "limit": args.limit,
        "chat_template": args.apply_chat_template,
        "prefix": evaluation.tokenizer.decode(evaluation.prefix),
        "context": opened.context,
        "cut": evaluation.all_cut,
        "lossy": list(opened.lossy.values()),
        "seconds": round(seconds, 3),
    }
    print(json.dumps(numbers))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", required=True, help="comma-separated names of tasks or groups")
    parser.add_argument("--limit", type=whole_from(1), help="documents of each task; all by default")
    parser.add_argument("--num_fewshot", type=whole_from(0), help="examples before each question (the task's own)")
    parser.add_argument("--apply_chat_template", action="store_true", help="put questions into the chat template")
    parser.add_argument("--include_path", help="a folder with further tasks")
    parser.add_argument("sizes", nargs="*", default=[], help="cap, expert_bits, dense_bits as of colibri.py")
    return exit_code("lm_eval_model", lambda: evaluate(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
