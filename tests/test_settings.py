"""Variables and arguments: defaults, refusals in one line, notices."""

import pytest

from errors import Refused
from settings import EMBEDDED_SNAPSHOT, IGNORED, RENAMED, Settings


def test_defaults():
    settings = Settings.read([], {})
    assert settings.snap == str(EMBEDDED_SNAPSHOT) and settings.prompt is None and not settings.tf
    assert (settings.cap, settings.expert_bits, settings.dense_bits) == (0, 16, 16)
    assert (settings.ngen, settings.ctx, settings.nucleus, settings.temp, settings.ram_gb) == (64, 0, 0.9, 0.7, 0)
    assert settings.prefix and not settings.chat and not settings.think
    assert settings.notices == ("[snapshot] SNAP is not set: models/tiny, the embedded model",)


def test_arguments_in_their_order():
    settings = Settings.read(["64", "4", "8"], {"SNAP": "x"})
    assert (settings.cap, settings.expert_bits, settings.dense_bits, settings.notices) == (64, 4, 8, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-1"], "cap='-1'"),
        (["many"], "cap='many'"),
        (["1", "3"], "expert_bits='3'"),
        (["1", "4", "32"], "dense_bits='32'"),
        (["1", "4", "8", "9"], "4 arguments"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(Refused, match=message):
        Settings.read(arguments, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NGEN", "0"),
        ("NGEN", "ten"),
        ("NGEN", "1_0"),
        ("NGEN", " 5"),
        ("NGEN", "9" * 5000),
        ("CTX", "-1"),
        ("CTX", "1e3"),
        ("CHAT", "yes"),
        ("PREFIX", "2"),
        ("SEED", "-1"),
        ("RAM_GB", "-1"),
        ("RAM_GB", "nan"),
        ("NUCLEUS", "most"),
        ("PREFILL_CHUNK", "-1"),
        ("SERVE", "http"),
        ("PORT", "65536"),
        ("KV_SLOTS", "0"),
        ("QUEUE", "-1"),
        ("PROMPT", ""),
        ("PROMPT", "  \n"),
    ],
)
def test_a_bad_value_names_its_variable(name, value):
    with pytest.raises(Refused, match=f"^{name}") as caught:
        Settings.read([], {name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "temp"), [("0", 0.0), ("0.5", 0.5), ("-1", 0.7), ("", 0.7)])
def test_temperature(value, temp):
    assert Settings.read([], {"TEMP": value}).temp == temp


@pytest.mark.parametrize("value", ["/tmp", "warm", "nan", "inf"])
def test_a_temp_that_is_no_number_is_no_temperature(value):
    """On some systems TEMP is the folder of temporary files."""
    settings = Settings.read([], {"TEMP": value, "SNAP": "x"})
    assert settings.temp == 0.7 and "TEMP" in settings.notices[0]


def test_a_prompt_that_is_not_utf_8_is_refused():
    with pytest.raises(Refused, match="PROMPT is not valid UTF-8"):
        Settings.read([], {"PROMPT": "caf\udce9"})  # a Latin-1 byte of the environment, as Python decodes it


@pytest.mark.parametrize("name", IGNORED)
def test_names_of_the_c_engine_are_never_silent(name):
    notice = Settings.read([], {name: "1", "SNAP": "x"}).notices[0]
    assert notice.startswith(f"[env] {name} does nothing here") and notice.endswith("see docs/env_vars.md")
    assert (f"; use {RENAMED.get(name)}," in notice) == (name in RENAMED)


def test_seed_is_chosen_when_unset_and_kept_when_set():
    assert Settings.read([], {"SEED": "42"}).seed == 42
    assert Settings.read([], {}).seed != Settings.read([], {}).seed
