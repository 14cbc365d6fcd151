"""Drafters over five words whose laws are any function of the text, honest or not."""

import torch
from exact_law import logits_after
from scripted import ScriptedSettings

from draftlab.drafters.base import DraftBudget, Drafter
from draftlab.drafters.tree import DraftTree
from draftlab.sampling import draw
from draftlab.targets.features import FeatureRequest


class FiveWords(Drafter, kind="five_words", settings=ScriptedSettings):
    """Draws from fixed random laws over some of the words; siblings without replacement.

    Attributes:
        drawn: the laws of the last proposal, as they were really drawn from.
    """

    grows_trees = True

    def __init__(self, num_draft_tokens, support=(0, 2, 4), seed=5):
        super().__init__()
        self.settings = ScriptedSettings(kind="five_words", num_draft_tokens=num_draft_tokens)
        self.support, self.seed, self._laws = support, seed, {}

    @property
    def needs(self):
        return FeatureRequest()

    def forward(self, batch, features, noise):
        raise NotImplementedError

    def open(self, slots, capacity, kv):
        return [[] for _ in range(slots)]

    def observe(self, state, seen):
        rows, lengths, ids, partners = (
            x.tolist() for x in (seen.rows, seen.lengths, seen.ids, seen.next_ids)
        )
        for i, row in enumerate(rows):
            if lengths[i]:
                assert not state[row] or state[row][-1] == ids[i][0]
                state[row] = [
                    *state[row][:-1],
                    *ids[i][: lengths[i]],
                    partners[i][lengths[i] - 1],
                ]

    def close(self, state, rows):
        for row in rows.tolist():
            state[row] = []

    def q(self, text):
        """Give the law after a text."""
        if text not in self._laws:
            law = logits_after(self.seed, 5, text[-6:])
            law[[i for i in range(5) if i not in self.support]] = -torch.inf
            self._laws[text] = law.softmax(0)
        return self._laws[text]

    def told(self, drawn):
        """Say which laws the tokens were drawn from."""
        return drawn

    def confidence(self, drawn, tokens):
        """Say how sure it is: from the laws alone."""
        return drawn.amax(2)

    def propose(self, state, budget: DraftBudget, uniforms):
        texts = [[tuple(state[row])] for row in budget.rows.tolist()]
        if budget.tree is None:
            parents = list(range(-1, budget.num_draft_tokens - 1))
        else:
            parents = list(budget.tree.parents)
        tokens, laws = [], []
        for node, parent in enumerate(parents):
            law = torch.stack([self.q(text[parent + 1]) for text in texts])
            for earlier in range(node):
                if parents[earlier] == parent:
                    law = law.scatter(1, tokens[earlier].unsqueeze(1), 0.0)
            law = law / law.sum(1, keepdim=True)
            chosen = draw(law, uniforms[:, node]) if budget.draws else law.argmax(1)
            if not budget.draws:
                law = torch.zeros_like(law).scatter(1, chosen.unsqueeze(1), 1.0)
            tokens.append(chosen)
            laws.append(law)
            for text, token in zip(texts, chosen.tolist(), strict=True):
                text.append((*text[parent + 1], token))
        chain, self.drawn = torch.stack(tokens, 1), torch.stack(laws, 1)
        rows, count = chain.shape
        told, ids = self.told(self.drawn), None
        if not budget.draws:
            told, ids = torch.ones(rows, count, 1, dtype=torch.float64), chain.unsqueeze(2)
        return DraftTree(
            tokens=chain,
            parents=torch.tensor(parents).expand(rows, -1),
            num_nodes=torch.full((rows,), count),
            law_probs=told,
            law_ids=ids,
            confidence=self.confidence(self.drawn, chain),
        )


class Sharpened(FiveWords, kind="five_words_sharpened", settings=ScriptedSettings):
    """Broken: tells the law at another temperature than it drew at."""

    def told(self, drawn):
        sharper = drawn**2
        return sharper / sharper.sum(2, keepdim=True)


class LooksAhead(FiveWords, kind="five_words_looks_ahead", settings=ScriptedSettings):
    """Broken: its confidence is the probability of the very token that was drawn."""

    def confidence(self, drawn, tokens):
        return drawn.gather(2, tokens.unsqueeze(2)).squeeze(2)


class SureOfTheSecond(FiveWords, kind="five_words_sure_of_the_second", settings=ScriptedSettings):
    """Half sure of its first token, and quite sure of those after it."""

    def confidence(self, drawn, tokens):
        sure = torch.ones(tokens.shape, dtype=torch.float64)
        sure[:, 0] = 0.5
        return sure
