"""How chat templates turn reasoning on and off, and the efforts they know: found by rendering, not by model names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import templates
from tests.text.test_call_form import compiled, compiled_once
from text.reasoning_control import EFFORTS

QUESTION = [{"role": "user", "content": "Hi"}]
NAMES = [name for name in vars(templates) if name.isupper()]
# name: (the switches, the efforts, the own one for each of minimal, low, medium, high, xhigh, max)
FOUND = {
    "GLM_5_2": (("enable_thinking",), ("high", "max"), "high high high high max max"),
    "GLM_5_3": ((), ("low", "high", "max"), "low low high high max max"),
    "GPT_OSS": ((), ("low", "medium", "high"), "low low medium high high high"),
    "DEEPSEEK_V3_1": (("thinking",), (), ""),
    "DEEPSEEK_V4": (("enable_thinking", "thinking"), ("medium", "high", "max"), "medium medium medium high max max"),
    "QWEN_3": (("enable_thinking",), (), ""),
    "QWEN_3_8": (("enable_thinking",), ("low", "medium", "high", "xhigh"), "low low medium high xhigh xhigh"),
    "HY_3": ((), ("low", "high"), "low low high high high high"),
    "MIXTRAL": ((), (), ""),
    "DEEPSEEK_R1": ((), (), ""),
}


@pytest.mark.parametrize("name", FOUND)
def test_switches_and_efforts_of_published_templates(name):
    """Field case: reasoning_effort low and medium gave GLM-5.2 its greatest effort, Qwen3.8 failed for max, gpt-oss was
    told 'Reasoning: minimal', and DeepSeek-V3.1 never reasoned, since its switch is called thinking."""
    switches, efforts, nearest = FOUND[name]
    control = compiled(getattr(templates, name)).reasoning
    assert (control.switches, control.efforts) == (switches, efforts)
    assert [control.nearest(effort) for effort in EFFORTS[1:]] == (nearest.split() or [None] * 6)


@pytest.mark.parametrize(
    ("name", "think", "effort", "ending"),
    [
        ("GLM_5_2", True, "high", "Effort: High<|user|>Hi<|assistant|><think>"),
        ("GLM_5_2", True, "max", "Effort: Max<|user|>Hi<|assistant|><think>"),
        ("GLM_5_2", False, None, "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"),
        ("DEEPSEEK_V3_1", True, None, "<Assistant><think>"),
        ("DEEPSEEK_V3_1", False, None, "<Assistant></think>"),
        ("DEEPSEEK_V4", True, "medium", "<user>Hi<think>"),
        ("HY_3", True, None, "high<think>"),
        ("HY_3", False, None, "no_think<think></think>"),
        ("HY_3", True, "low", "low<think>"),
        ("QWEN_3", False, None, "<think>\n\n</think>"),
    ],
)
def test_the_prompt_of_a_wish(name, think, effort, ending):
    template = compiled(getattr(templates, name))
    text = template.render(QUESTION, **template.reasoning.variables(think, effort))
    assert text.rstrip().endswith(ending)


def test_what_a_template_cannot_do():
    names = ("GPT_OSS", "MIXTRAL", "DEEPSEEK_R1", "QWEN_3")
    controls = [compiled(getattr(templates, name)).reasoning for name in names]
    assert [control.can_reason for control in controls] == [True, False, True, True]
    assert [control.can_stop for control in controls] == [False, True, False, True]
    # A template that holds </think> for earlier answers alone: nobody knows.
    unknown = compiled("{{ messages[0].content.split('</think>')[-1] }}").reasoning
    assert unknown.can_reason and unknown.can_stop and not unknown.has_switch


@pytest.mark.parametrize("name", NAMES)
def test_the_same_at_every_start(name):
    """The clock stands still while a template is probed: one that prints the time has no other efforts for it."""
    controls = [compiled(getattr(templates, name)).reasoning for _ in range(3)]
    assert len({(c.switches, c.efforts, c.off_word, c.default_effort, c.always) for c in controls}) == 1
    template = compiled(getattr(templates, name))
    assert template.reasoning is template.reasoning  # probed once


@settings(max_examples=50)
@given(st.sampled_from(NAMES), st.sampled_from(EFFORTS[1:]), st.booleans())
def test_every_effort_of_a_client_is_one_of_the_template(name, effort, think):
    """It renders, and a greater effort never gives a lesser one."""
    template = compiled_once(getattr(templates, name))
    control = template.reasoning
    own = control.nearest(effort)
    assert own in control.efforts if control.efforts else own is None
    assert template.probe(QUESTION, **control.variables(think, own)) is not None
    ranks = [EFFORTS.index(control.nearest(word)) for word in EFFORTS[1:]] if control.efforts else []
    assert ranks == sorted(ranks)


def test_a_broken_template_has_no_control():
    control = compiled("{{ 1 / 0 if enable_thinking else reasoning_effort.x.y }}").reasoning
    assert (control.switches, control.efforts) == ((), ())
