"""THINK=1 in every door that renders a chat: PROMPT, the terminal chat, servers and evaluations."""

from types import SimpleNamespace

import pytest

from dev.evaluation import Evaluation
from modes.chat_history import ChatHistory
from modes.text import encode_prompt
from server.service import Service
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from tests.support import templates
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
NOTICE = "[think] THINK=1 has no effect: the chat template has no switch for reasoning"


@pytest.mark.parametrize("think", ["0", "1"])
@pytest.mark.parametrize("name", ["DEEPSEEK_V3_1", "GLM_5_2", "HY_3", "MIXTRAL"])
def test_think_in_every_door(text_folder, capsys, name, think):
    """THINK=1 did nothing, without a word, where the template's switch is not called enable_thinking."""
    (text_folder / "chat_template.jinja").write_text(getattr(templates, name))
    settings = Settings.read([], {"PROMPT": "Hi", "CHAT": "1", "THINK": think, "SNAP": str(text_folder), "PREFIX": "0"})
    tokenizer = TextTokenizer(text_folder, CONFIG)
    has_switch = name != "MIXTRAL"

    prompts = [tokenizer.decode(encode_prompt(settings, CONFIG, tokenizer))]
    assert (NOTICE in capsys.readouterr().err) == (think == "1" and not has_switch)
    history = ChatHistory(settings, CONFIG, tokenizer, 4096)
    prompts.append(tokenizer.decode(history.add_question("Hi")))
    opened = SimpleNamespace(folder=text_folder, config=CONFIG, context=4096)
    prompts.append(Evaluation(settings, opened).render_chat([{"role": "user", "content": "Hi"}]))
    assert (NOTICE in capsys.readouterr().err) == (think == "1" and not has_switch)
    assert len({prompt.strip() for prompt in prompts}) == 1
    assert prompts[0].rstrip().endswith("<think>") == (think == "1" and has_switch)

    lines = []
    scheduler = SimpleNamespace(context=4096, statistics=lambda: {"slots": 1})
    Service(settings, SimpleNamespace(config=CONFIG), scheduler, tokenizer, lines.append)
    assert (NOTICE in lines) == (think == "1" and not has_switch)
