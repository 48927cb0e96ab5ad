"""The training of models/tiny: the twin equals the reference, and the engine runs the snapshot that it saves."""

import json
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from dev.tiny.model import TinyGlm, index_loss
from dev.tiny.texts import as_chat, read_jargon, read_kjv, split_turns
from dev.tiny.tokenizer import save_tokenizer, train_tokenizer
from dev.train_tiny import CONFIG, Corpus, evaluate, held_out_sequences, train
from tests.conftest import FIXTURES, read_json, reference

NAME = "glm_moe_dsa_mtp"


@pytest.fixture(scope="module")
def twin():
    """The twin with the weights of the fixture."""
    config = SimpleNamespace(**read_json(FIXTURES / NAME / "config.json"))
    stored = safetensors.torch.load_file(FIXTURES / NAME / "model.safetensors")
    model, state = TinyGlm(config), {}
    for name in model.state_dict():
        published = name if name.startswith("lm_head") else f"model.{name}"
        prefix = published.rsplit(".", 1)[0]
        experts = [f"{prefix}.experts.{e}" for e in range(config.n_routed_experts)]
        if name.endswith("experts_gate_up"):
            pairs = [(stored[f"{e}.gate_proj.weight"], stored[f"{e}.up_proj.weight"]) for e in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs]).float()
        elif name.endswith("experts_down"):
            state[name] = torch.stack([stored[f"{e}.down_proj.weight"] for e in experts]).float()
        elif name.endswith("e_score_correction_bias"):
            state[name] = stored[f"{prefix}.gate.e_score_correction_bias"]
        else:
            state[name] = stored[published].float()
    model.load_state_dict(state)
    return model, stored


def test_the_twin_computes_the_reference_mtp_layer_included(twin):
    """With the indexer selecting 12 of 48 positions: language and MTP logits within 1e-3 of the reference."""
    ref, tensors = reference(NAME)
    with torch.no_grad():
        logits, mtp_logits, _ = twin[0].logits(torch.tensor([ref["seq"]]), mtp_rows=1)
    torch.testing.assert_close(logits[0], tensors["logits"][:47], atol=1e-3, rtol=0)
    torch.testing.assert_close(mtp_logits[0], tensors["mtp_logits"][:46], atol=1e-3, rtol=0)


def test_the_snapshot_has_the_published_names_and_values(twin):
    model, stored = twin
    snapshot = model.snapshot()
    assert snapshot.keys() == stored.keys()
    assert all(torch.equal(snapshot[name], stored[name]) for name in stored)


def test_the_language_loss_gives_the_indexer_no_gradient(twin):
    """The trap: its choice is discrete. Its own loss alone trains it, and trains nothing else."""
    model = twin[0]
    ids = torch.tensor([reference(NAME)[0]["seq"]])

    def trained_by(part):
        model.zero_grad(set_to_none=True)
        model(ids, probe=1, mtp_rows=1)[part].backward()
        return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}

    assert not [name for name in trained_by(0) | trained_by(1) if "indexer" in name]
    indexed = trained_by(2)
    assert indexed and all("indexer" in name for name in indexed)


def test_the_index_loss_is_zero_for_a_perfect_indexer():
    attention = torch.tensor([[[2.0, 0.0], [0.5, 1.5]]])
    perfect = attention.clamp_min(1e-30).log()
    assert float(index_loss([(perfect, attention)])) == pytest.approx(0, abs=1e-5)
    # the shared layer that follows counts too
    assert float(index_loss([(perfect, attention), (None, attention.flip(-1).tril())])) > 0.05


@pytest.mark.slow
def test_a_short_training_makes_a_snapshot_that_the_engine_runs(load, tmp_path):
    torch.manual_seed(0)
    words = ["the", "king", "said", "unto", "all", "his", "men", "go", "forth", "and", "speak"]
    picks = torch.randint(len(words), (400, 12), generator=torch.Generator().manual_seed(1)).tolist()
    prose = ["\n".join(" ".join(words[i] for i in row) for row in picks[:300])]
    chat = [as_chat([("A.", " ".join(words[i] for i in row)) for row in picks])]
    config = CONFIG | {"vocab_size": 300, "hidden_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2}
    tokenizer = train_tokenizer(prose, vocab_size=300)
    save_tokenizer(tokenizer, tmp_path, 1024)
    model = TinyGlm(SimpleNamespace(**config))
    corpus = Corpus(tokenizer, prose + chat, seed=1)
    assert corpus.batch(2, 64)[:, :2].tolist() == [[tokenizer.token_to_id(t) for t in ("[gMASK]", "<sop>")]] * 2
    rows = held_out_sequences(tokenizer, prose, 64)
    before = evaluate(model, rows)[0]
    tokens = train(model, corpus, minutes=0.15, log=lambda line: None, after_block=lambda block: None)
    assert tokens > 0 and evaluate(model, rows)[0] < before
    safetensors.torch.save_file(model.snapshot(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [0]}))
    from tests.forward.test_forward import greedy

    assert len(greedy(load(tmp_path, cap=1).model, [1, 2, 3], 8)) == 8


def test_texts_are_cut_into_documents(tmp_path):
    (tmp_path / "kjv.txt").write_text("Ge1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus the heavens.\n")
    assert read_kjv(tmp_path / "kjv.txt") == ["In the beginning.\nAnd the earth.", "Thus the heavens."]
    entry = "   :foo: n.\n\n   " + "A metasyntactic {variable},\n   “quoted”. " * 3 + "\n\n"
    (tmp_path / "jargon.txt").write_text("front matter\n" + entry + entry.replace("foo", "bar"), encoding="utf-8")
    [document] = read_jargon(tmp_path / "jargon.txt")
    assert document.startswith(':foo: n.\nA metasyntactic variable, "quoted".') and ":bar: n." in document
    scene = "ACT I.\n\nHam.\nWords, words.\n\n[Enter Ghost.]\n\nPol.\nWhat is the matter, my lord?"
    assert split_turns(scene) == [("Ham.", "Words, words."), ("Pol.", "What is the matter, my lord?")]
    assert as_chat(split_turns(scene)) == (
        "<|user|>Words, words.<|assistant|><think></think>What is the matter, my lord?<|user|>"
    )
