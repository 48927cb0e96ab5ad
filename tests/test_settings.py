"""Variables and arguments: defaults, refusals in one line, notices."""

import os
from pathlib import Path

import pytest

from errors import Refused
from settings import EMBEDDED_SNAPSHOT, IGNORED, RENAMED, VARIABLES, Settings


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
        ("KV_SLOTS", "65"),
        ("PROMPT", ""),
        ("PROMPT", "  \n"),
    ],
)
def test_a_bad_value_names_its_variable(name, value):
    with pytest.raises(Refused, match=f"^{name}") as caught:
        Settings.read([], {name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("PORT", "65536"), ("PORT", "tcp://10.0.0.1:80"), ("QUEUE", "-1"), ("API_KEY", "0")]
)
def test_variables_of_a_server_count_with_a_server_alone(name, value):
    """PROMPT=... was refused where another program's QUEUE=default or PORT=/dev/ttyUSB0 was set."""
    with pytest.raises(Refused, match=f"^{name}"):
        Settings.read([], {"SERVE": "1", name: value})
    for variables in ({}, {"SERVE": "0"}, {"PROMPT": "x"}):
        settings = Settings.read([], {name: value, "SNAP": "x"} | variables)
        assert (settings.port, settings.queue, settings.api_key, settings.notices) == (8000, 64, None, ())


DEFAULTS = Settings.read([], {"SERVE": "1", "SEED": "1"})
NOT_OFF = {  # 0 is a value of these: a text, a seed, greedy, any free port, no queue; or refused by name
    "PROMPT": "0", "SEED": 0, "TEMP": 0.0, "NUCLEUS": 0.0, "PORT": 0, "QUEUE": 0, "DRAFT": "0", "LOOKAHEAD": "0",
    "NGEN": None, "API_KEY": None, "KV_DTYPE": None, "KERNELS": None, "READ_MODE": None,
    "PREFIX": False, "USAGE": False, "DRAFT_GUARD": False, "SERVE": None,
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_0_is_off_everywhere(name):
    """REPLAY=0 and TF=0 switched these modes on, and SCORE=0, REPORT=0, REF=0 meant files called 0."""
    environ = {"SERVE": "1", "SEED": "1", name: "0"}
    field = VARIABLES[name].name
    if name in NOT_OFF and NOT_OFF[name] is None and name != "SERVE":
        with pytest.raises(Refused, match=f"^{name}=.?0"):
            Settings.read([], environ)
        return
    value = getattr(Settings.read([], environ), field)
    assert value == NOT_OFF.get(name, getattr(DEFAULTS, field)) or (name == "TERM" and value is True)
    if name == "SERVE":
        assert value is None


@pytest.mark.parametrize("name", ["REPLAY", "TF"])
def test_a_switch_is_on_with_anything_else(name):
    assert all(getattr(Settings.read([], {name: value}), name.lower()) for value in ("1", "yes", "true"))
    assert not getattr(Settings.read([], {name: ""}), name.lower())


@pytest.mark.parametrize(
    "value",
    ["x86_64-conda-linux-gnu", "my-machine", "my-machine.local", "0.0.0.0:8000", "http://127.0.0.1", "caf\u00e9"],
)
def test_a_host_that_is_no_address_is_not_listened_on(value):
    """conda's compilers set HOST to a triplet and tcsh to the machine's name: SERVE=1 was refused."""
    settings = Settings.read([], {"SERVE": "1", "HOST": value, "SNAP": "x"})
    assert settings.host == "127.0.0.1" and settings.notices[0].startswith("[env] HOST=")
    assert Settings.read([], {"HOST": value, "SNAP": "x"}).notices == ()


@pytest.mark.parametrize("value", ["0.0.0.0", "::1", "[::]", "fe80::1%lo", "localhost", "192.168.1.2"])
def test_a_host_that_is_an_address_is_kept(value):
    settings = Settings.read([], {"SERVE": "1", "HOST": value, "SNAP": "x"})
    assert settings.host == value.strip("[]") and settings.notices == ()


SHELL_PROMPTS = ("%m%# ", "%# ", "%n@%m %1~ %# ", "[%n@%m]%~%# ", "%F{green}%n%f:%~ %# ", "%B%2~%b %(!.#.$) ")
SHELL_PROMPTS += ("$P$G", "$p$g", "$P$_$G", "$T$H$H$H$S$P$G", "$e[32m$P$G$e[0m", "%{\x1b[1m%}%~%{\x1b[0m%} \u276f ")
SHELL_PROMPTS += ("%{$fg[cyan]%}%c%{$reset_color%} $(git_prompt_info)",)
TEXTS = (
    "Once upon a time",
    "100%",
    "50% of $20",
    "$",
    "%",
    "...",
    "0",
    'printf("%d %s")',
    "$5",
    "a %s b",
    "\u4f60\u597d",
)
TEXTS += ("%d items", "Use $HOME", "C:\\>", "# Title", "What is 3 % 2?", "{{x}} %}", "%{" + "%{%}" * 5000 + "w")


@pytest.mark.parametrize("value", SHELL_PROMPTS)
def test_a_prompt_of_a_shell_is_no_text(value):
    """Where zsh or cmd export PROMPT, REPLAY=1 continued "%m%#" and CHAT=1 answered it."""
    settings = Settings.read([], {"PROMPT": value, "CHAT": "1", "SNAP": "x"})
    assert settings.prompt is None and settings.is_chat and settings.ngen == 256
    assert settings.notices[0].startswith("[env] PROMPT=") and "a shell's prompt" in settings.notices[0]


@pytest.mark.parametrize("value", TEXTS, ids=lambda value: value[:12])
def test_a_text_with_signs_is_a_text(value):
    assert Settings.read([], {"PROMPT": value}).prompt == value


def test_names_that_other_programs_use_for_folders():
    """Termux and conda set PREFIX, snap packages SNAP: every run was refused there."""
    settings = Settings.read([], {"PREFIX": "/data/data/com.termux/files/usr", "SNAP": "/snap/code/190"})
    assert settings.prefix and settings.snap == str(EMBEDDED_SNAPSHOT)
    assert [notice.split("=")[0] for notice in settings.notices[:2]] == ["[env] SNAP", "[env] PREFIX"]


# --- the cache folder -------------------------------------------------------------------------------------------------


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_the_cache_folder(monkeypatch, tmp_path):
    """A user id without an entry and HOME ended in a traceback; HOME=/ (docker -u 1234) took the slow kernels."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    instead = tmp_path / "temporary" / f"colibri.py-{os.getuid()}"
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path / "home" / "new")
    assert Settings.read([], {"SNAP": "x"}).cache == tmp_path / "home" / "new" / ".cache" / "colibri.py"
    monkeypatch.setattr("os.access", lambda path, mode: False)  # of a read-only file system, also to root
    unwritable = Settings.read([], {"SNAP": "x"})
    monkeypatch.setattr("pathlib.Path.home", no_home)
    for settings in (unwritable, Settings.read([], {"SNAP": "x"})):
        assert settings.cache == instead and "set XDG_CACHE_HOME" in settings.notices[0] and not instead.exists()
    assert Settings.read([], {"XDG_CACHE_HOME": "/a"}).cache == Path("/a/colibri.py")
    relative = Settings.read([], {"XDG_CACHE_HOME": "here", "SNAP": "x"})
    assert relative.cache == instead and "XDG_CACHE_HOME" in relative.notices[0]


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
