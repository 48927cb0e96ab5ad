"""NaN and infinity end the run or are never sampled: no run of token 0, no silent answer."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from forward.finite import NonFinite, NonFiniteWarning, check_logits
from forward.kv_cache import make_kv_cache
from forward.step import step_all
from generate.decode import spec_decode
from generate.sampler import Sampler
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, reference

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8, 0.9, seed=1)], ids=["greedy", "0.8"])
def test_one_bad_logit_is_warned_about_and_never_sampled(load, monkeypatch, bad, sampler):
    """The best token's logit is bad: the tokens come from the others, and from more than one of them."""
    import forward.step

    ref, _ = reference("glm_moe_dsa")
    model, plain = load(FIXTURES / "glm_moe_dsa").model, forward.step.lm_head
    bad_id = ref["greedy"]["continuation"][0]

    def lm_head(model, hidden):
        logits = plain(model, hidden)
        logits[:, bad_id] = bad
        return logits

    monkeypatch.setattr(forward.step, "lm_head", lm_head)
    kv = make_kv_cache(model.config, 40)
    with pytest.warns(NonFiniteWarning, match=rf"1 of 512 logits after position \d+ \(id {bad_id} first\)"):
        tokens = list(spec_decode(model, kv, ref["greedy"]["prompt"], sampler, 24))
    assert bad_id not in tokens and len(set(tokens)) > 5


def test_the_warning_comes_once_in_a_run(load, capsys):
    import warnings

    from machine.console import say_warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        say_warnings()
        for position in (3, 4, 5):
            check_logits(torch.tensor([[NAN, 1.0]]), [position])
    err = capsys.readouterr().err
    assert err.count("[warning]") == 1 and "1 of 2 logits after position 3" in err


def test_a_row_without_a_finite_logit_ends_the_run():
    with pytest.raises(NonFinite, match="no logit after position 7 is finite"):
        check_logits(torch.tensor([[1.0, 2.0], [NAN, INF]]), [6, 7])


def test_a_hidden_state_that_is_not_finite_names_layer_and_position(load):
    ref, _ = reference("glm_moe_dsa")
    loaded = load(FIXTURES / "glm_moe_dsa")
    weights = loaded.model.weights.layers[2].attention
    weights.o.data[5, 0] = NAN
    kv = make_kv_cache(loaded.model.config, 48)
    with pytest.raises(NonFinite, match="after layer 2 is not finite at position 0"):
        step_all(loaded.model, [(ref["seq"], kv)])
    assert kv.length == 0


@pytest.mark.parametrize("mode", ["PROMPT", "TF", "REPLAY", "SCORE", "check"])
def test_nan_weights_exit_with_1_in_every_mode(run_colibri, tmp_path, mode):
    folder = tmp_path / "snap"
    shutil.copytree(EMBEDDED_SNAPSHOT, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.3.self_attn.o_proj.weight"][0, 0] = NAN
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (tmp_path / "requests.txt").write_text(json.dumps({"context": [1, 2], "continuation": [3]}) + "\n")
    variables = {"PROMPT": "x", "TF": 1, "REPLAY": 1, "SCORE": tmp_path / "requests.txt", "check": None}
    process = run_colibri(SNAP=folder, **({} if mode == "check" else {mode: variables[mode]}))
    err = process.stderr.decode()
    assert process.returncode == 1 and "after layer 3 is not finite at position 0" in err and "Traceback" not in err
