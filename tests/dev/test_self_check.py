"""dev/self_check.py: prints that all ids are equal, or the first difference."""

import generate.engine
from dev import self_check


def test_all_ids_are_equal_on_the_embedded_model(capsys):
    assert self_check.main(["--rows", "3", "--tokens", "10"]) == 0
    out = capsys.readouterr().out
    assert "a full forward for every token: 10 tokens" in out and "Engine, 3 sequences, DRAFT=0" in out
    assert "Engine, 1 sequence, DRAFT=auto" in out and "Engine, 3 sequences, DRAFT=auto" in out
    assert "spec_decode, DRAFT=auto" in out and out.endswith("all ids are equal\n")


def test_a_difference_is_exit_code_1_and_named(capsys, monkeypatch):
    plain = generate.engine.Engine.generate

    def wrong(self, *args, **options):
        for step, (ids, masks) in enumerate(plain(self, *args, **options)):
            yield [i + (step == 4 and row == 1) for row, i in enumerate(ids)], masks

    monkeypatch.setattr(generate.engine.Engine, "generate", wrong)
    assert self_check.main(["--rows", "2", "--tokens", "8"]) == 1
    out = capsys.readouterr().out
    assert "sequence 1 of 2 sequences, DRAFT=auto: token 4 is " in out and out.endswith("2 differ\n")


def test_bad_usage_is_one_line(capsys):
    assert self_check.main(["--rows", "0"]) == 2
    assert capsys.readouterr().err == "self_check: --rows and --tokens must be 1 or more\n"
