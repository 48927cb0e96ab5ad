"""Where drafts come from. A source guesses; spec_decode verifies, so a wrong guess costs time and nothing else."""


class NoDraft:
    """The empty source: one token per forward."""

    def propose(self, ids, max_tokens):
        """ids of the sequence so far -> at most max_tokens guesses of what follows."""
        return []
