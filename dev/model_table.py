"""Write docs/models.md: the formats and modes that are tested for each model type, from test_families.py.

    python dev/model_table.py

An entry means that there is a test with that model; tests/test_house.py compares the file.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from machine.exit import exit_code

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
NOTES = {  # fixture -> its models
    "glm_moe_dsa_mtp": "GLM-5, 5.1, 5.2: MLA with a sparse indexer, MTP",
    "glm_moe_dsa_fp8": "the same with FP8 blocks of 128 x 128",
    "mixtral": "Mixtral 8x7B, 8x22B; SmolLM2 as `make smollm` cuts it",
    "qwen3_moe": "Qwen3-30B-A3B, 235B-A22B",
    "olmoe": "OLMoE 1B-7B",
    "glm4_moe": "GLM-4.5, 4.6, 4.7, Air",
    "deepseek_v3": "DeepSeek V3, V3.1, R1",
    "deepseek_v3_yarn": "the same without a query latent, with yarn",
    "deepseek_v32": "DeepSeek V3.2",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "deepseek_v2": "DeepSeek V2-Lite, Coder V2-Lite",
    "gpt_oss": "gpt-oss-20b, 120b: windows, sinks, MXFP4",
}
HEAD = """\
# Models

Made by `python dev/model_table.py` from the cases of tests/forward/test_families.py: an entry means that a test with
a small model of that type passes. "numbers" are logits, log-probabilities and greedy ids equal to transformers', with
the C kernels and with KERNELS=reference; "modes" are the check, TF and SCORE through colibri.py, also with one expert
slot a layer; "bits" says that a token's logits are the same bits alone, in any batch and at any prefill chunk; "rows"
that N sequences in lock-step equal N runs; "drafts" that draft tokens change no output: those of n-grams, and those
of an MTP layer, whose logits and chained drafts equal a reference's, or that is only wired ("MTP, no numbers");
"containers" lists the bits tested with convert.py and with quantization at load. "hub" are files with a tensor for
each expert, "fused" with one for all experts of a layer. A model runs from its Hugging Face folder, whatever its
size.

| model type | of | files as | numbers | modes | bits | rows | drafts | containers |
|---|---|---|---|---|---|---|---|---|
"""


def cases(test: Callable) -> list[dict[str, Any]]:
    """A parametrized test -> its cases, {argument: value} each."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [names] if isinstance(names, str) else names
            axes.append([dict(zip(names, one if len(names) > 1 else (one,), strict=True)) for one in values])
    return [{key: value for part in parts for key, value in part.items()} for parts in itertools.product(*axes)]


def table() -> str:
    """The document, as text."""
    from tests.conftest import FIXTURES, read_json
    from tests.forward import test_families as tests

    def has(test: Callable, **wanted: Any) -> bool:
        return any(all(case.get(key) == value for key, value in wanted.items()) for case in cases(test))

    lines = []
    for name in tests.FAMILIES:
        namings = [naming for of, naming in tests.NAMINGS if of == name]
        both = all(
            has(tests.test_logits_log_probabilities_and_greedy_ids, name=name, naming=naming, kernels=kernels)
            for naming in namings
            for kernels in ("native", "reference")
        )
        modes = all(
            has(test, name=name, naming=naming)
            for naming in namings
            for test in (tests.test_every_mode, tests.test_one_expert_slot_a_layer_gives_the_same_ids)
        )
        drafts = ["n-gram"] if has(tests.test_drafts_change_no_token, name=name) else []
        if has(tests.test_the_mtp_layer_equals_transformers, name=name):
            drafts.append("MTP")
        elif has(tests.test_an_mtp_layer_made_of_the_last_one_drafts_and_changes_no_token, name=name):
            drafts.append("MTP, no numbers")
        formats = {
            "16": tests.test_a_container_of_sixteen_bits_is_the_model_itself,
            "8": tests.test_a_container_of_eight_bits,
            "8 at load": tests.test_quantized_at_load,
        }
        words = [
            f"`{read_json(FIXTURES / name / 'config.json')['model_type']}`",
            NOTES[name],
            ", ".join(namings),
            "yes" if both else "",
            "yes" if modes else "",
            "equal" if has(tests.test_logits_are_the_same_bits_in_any_batch, name=name) else "",
            "equal" if has(tests.test_sequences_of_one_batch, name=name) else "",
            ", ".join(drafts),
            ", ".join(word for word, test in formats.items() if has(test, name=name)),
        ]
        lines.append(f"| {' | '.join(words)} |\n")
    return HEAD + "".join(lines)


def main() -> int:
    DOCUMENT.write_text(table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("model_table", main))
