"""What tests of EAGLE heads share: packed batches, hand-driven decoding, and slow references.

A reference runs a head as one causal sequence over everything a draft row may see, plainly.
"""

import math

import torch
from torch.nn.functional import smooth_l1_loss

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY


def make_batch(samples, width):
    """Pack samples [(ids, first learned position)] into rows, as many as fit one after another."""
    rows, row = [], []
    for sample in samples:
        if row and sum(len(ids) for ids, _ in row) + len(sample[0]) > width:
            rows.append(row)
            row = []
        row.append(sample)
    rows.append(row)
    shape = (len(rows), width)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, -1)
    sample_ids, number = torch.full_like(ids, -1), 0
    for b, row in enumerate(rows):
        start = 0
        for segment, (tokens, learned) in enumerate(row):
            end = start + len(tokens)
            ids[b, start:end] = torch.tensor(tokens)
            mask[b, start + learned : end] = True
            positions[b, start:end] = torch.arange(len(tokens))
            segments[b, start:end] = segment
            sample_ids[b, start:end] = number
            number += 1
            start = end
    return TokenBatch(ids, mask, positions, segments, sample_ids)


def random_tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def samples():
    return [(random_tokens(9, 1), 4), (random_tokens(7, 2), 0), (random_tokens(12, 3), 6)]


def features_of(target, drafter, ids):
    batch = make_batch([(ids, 0)], len(ids))
    return target.read_features(batch, drafter.needs)


# ---------------------------------------------------------------- references


def rotate_plainly(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def reference_pass(drafter, embedded, hidden):
    """Run rows of (embedding, hidden) through the layers as one causal sequence; give all outputs."""
    sizes = drafter.sizes
    length = embedded.shape[0]
    cos, sin = drafter.target.rope(torch.arange(length))
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    window = getattr(drafter.settings, "sliding_window", None)
    if window is not None:
        seen = seen.triu(1 - window)
    for layer in drafter.layers:
        attention = layer.self_attn
        if layer.hidden_norm is not None:
            normed = layer.hidden_norm(hidden)
            x = torch.cat([layer.input_layernorm(embedded), normed], -1)
            residual = normed if layer.norm_before_residual else hidden
        else:
            x = hidden if layer.input_layernorm is None else layer.input_layernorm(hidden)
            residual = hidden
        q = attention.q_proj(x).view(length, sizes.heads, -1).transpose(0, 1)
        k = attention.k_proj(x).view(length, sizes.kv_heads, -1).transpose(0, 1)
        v = attention.v_proj(x).view(length, sizes.kv_heads, -1).transpose(0, 1)
        groups = sizes.heads // sizes.kv_heads
        q, k = rotate_plainly(q, cos, sin), rotate_plainly(k, cos, sin)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(sizes.head_dim)
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = (probs @ v).transpose(0, 1).reshape(length, -1)
        residual = residual + attention.o_proj(mixed)
        hidden = residual + layer.mlp(layer.post_attention_layernorm(residual))
    return hidden


def fuse_taps(drafter, taps):
    if drafter.fc_norm is not None:
        taps = torch.stack([n(taps[..., i, :]) for i, n in enumerate(drafter.fc_norm)], -2)
    joined = taps.flatten(-2)
    return drafter.fc(joined if drafter.input_norm is None else drafter.input_norm(joined))


def reference_step(drafter, tokens, hidden):
    """Give (what the LM head reads, what is fed back) of the last of a sequence's positions."""
    embedded = drafter.target.embed(torch.tensor(tokens))
    if drafter.kind == "eagle":
        out = reference_pass(drafter, embedded, drafter.fc(torch.cat([embedded, hidden], -1)))[-1]
        return out, out.detach()
    out = reference_pass(drafter, embedded, hidden)[-1]
    normed = drafter.norm(out)
    return normed, normed if drafter.settings.norm_output else out


def head_rows(drafter):
    return drafter._matrices[0]


def reference_states(drafter, features, tokens, t, steps, choose=None):
    """Run a draft chain after positions 0..t; give what the LM head reads at depths 0..steps - 1.

    Args:
        features: of the target for the positions of `tokens`.
        tokens: those known; at depth s >= 1 token t + 1 + s is read.
        choose: from logits to the next token, instead of `tokens`.
    """
    if drafter.kind == "eagle":
        hidden = features.final[0, : t + 1]
    else:
        hidden = fuse_taps(drafter, features.taps[0, : t + 1])
    read = list(tokens[1 : t + 2])
    judged = []
    for s in range(steps):
        if s > 0:
            logits = judged[-1] @ head_rows(drafter).T
            read.append(tokens[t + 1 + s] if choose is None else choose(drafter, logits))
        state, fed = reference_step(drafter, read, hidden)
        judged.append(state)
        hidden = torch.cat([hidden, fed.unsqueeze(0)])
    return judged


def reference_chain(drafter, features, tokens, t, steps, choose=None):
    """Give the logits of depths 0..steps - 1; see `reference_states`."""
    states = reference_states(drafter, features, tokens, t, steps, choose)
    return [state @ head_rows(drafter).T for state in states]


def likeliest(drafter, logits):
    allowed = drafter_ids(drafter)
    allowed = allowed[allowed < drafter.target.spec.num_token_ids]  # padding rows come last
    return allowed[logits[: len(allowed)].argmax()].item()


def drafter_ids(drafter):
    if drafter.vocab is not None:
        return drafter.vocab.ids
    return torch.arange(drafter.target.spec.vocab_size)


def expected_chain(drafter, target, text, depth):
    features = features_of(target, drafter, text[:-1])
    logits = reference_chain(drafter, features, text, len(text) - 2, depth, choose=likeliest)
    return [likeliest(drafter, x) for x in logits]


def sample_loss(drafter, features, sample, found, num_depths):
    """Mean loss of a sample, and per depth the sums of loss, hits, overlap and count.

    Args:
        features: of the target for the sample.
        found: (depth, place of the token predicted, what the LM head reads), learned or not.
    """
    ids, learned = sample
    choices, head, matrices = drafter.settings, drafter.target.head, drafter._matrices
    total, weight = 0.0, 0.0
    sums = torch.zeros(4, num_depths, dtype=torch.float64)
    for depth, place, state in found:
        if not learned <= place < len(ids):
            continue
        final = features.final[:, place - 1]
        scores = score_rows(
            objective(choices.objective),
            head(final),
            (state @ matrices[depth if len(matrices) > 1 else 0].T).unsqueeze(0),
            torch.tensor([ids[place]]),
            None if drafter.vocab is None else drafter.vocab.ids,
        )
        loss = scores.loss[0]
        if drafter.kind == "eagle":
            loss = loss + choices.feature_weight * smooth_l1_loss(state, final[0])
        share = choices.decay**depth
        total, weight = total + share * loss, weight + share
        if drafter.vocab is None or (place - 1) % 8 == 0:  # a reduced one is judged at every eighth
            told = [loss.item(), scores.hit.item(), scores.overlap.item(), 1.0]
            sums[:, depth] += torch.tensor(told, dtype=torch.float64)
    return total / weight, sums


# ---------------------------------------------------------------- decoding by hand


def observe(drafter, state, target, rows, texts, spans):
    """Observe positions [start, end) of each text; texts hold one token more than is observed."""
    width = max(end - start for start, end in spans)
    dtype = torch.float64
    taps = torch.zeros(len(rows), width, max(1, len(drafter.needs.tap_layers)), 64, dtype=dtype)
    final = torch.zeros(len(rows), width, 64, dtype=dtype)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    next_ids = torch.zeros_like(ids)
    for r, (text, (start, end)) in enumerate(zip(texts, spans, strict=True)):
        found = features_of(target, drafter, text[:-1])
        for kept, given in ((taps, found.taps), (final, found.final)):
            if given is not None:
                kept[r, : end - start] = given[0, start:end]
            kept[r, end - start :] = 1e3  # what lies past a row's length must not matter
        ids[r, : end - start] = torch.tensor(text[start:end])
        next_ids[r, : end - start] = torch.tensor(text[start + 1 : end + 1])
    lengths = torch.tensor([end - start for start, end in spans])
    given_taps = taps if drafter.needs.tap_layers else None
    seen = Observation(torch.tensor(rows), ids, lengths, next_ids, given_taps, final)
    drafter.observe(state, seen)


def propose(drafter, state, rows, depth, sampling=GREEDY, seed=7, **budget):
    """Ask for drafts; `depth` uniforms a row, or as many as a static tree has nodes."""
    tree = budget.get("tree")
    count = len(tree.parents) if hasattr(tree, "parents") else depth
    uniforms = torch.rand(len(rows), count, generator=torch.Generator().manual_seed(seed))
    asked = DraftBudget(torch.tensor(rows), depth, sampling, **budget)
    return drafter.propose(state, asked, uniforms.double())


def opened(drafter, target, slots=3, capacity=40):
    return drafter.open(slots, capacity, target.open_kv(slots, capacity))


# ---------------------------------------------------------------- trees


def paths_of(tree, row):
    """Give each node's tokens from the root's child down to itself."""
    paths = []
    for node in range(int(tree.num_nodes[row])):
        parent = int(tree.parents[row, node])
        assert parent < node
        before = [] if parent < 0 else paths[parent]
        paths.append([*before, int(tree.tokens[row, node])])
    return paths


def replayed_laws(drafter, target, text, paths, temperature=1.0):
    """Give the law of every node's place by running its path as a chain, token by token."""
    features = features_of(target, drafter, text[:-1])
    count = len(text) - 2
    size = len(drafter_ids(drafter)) if drafter.vocab else target.spec.num_token_ids
    laws = []
    for path in paths:
        logits = reference_chain(drafter, features, [*text, *path], count, len(path))[-1]
        laws.append((logits[:size] / temperature).softmax(-1))
    return laws


def train_shortly(drafter, target):
    """Train on four answers for 40 steps; give the loss of each."""
    batch = make_batch([(random_tokens(20, seed), 4) for seed in range(4)], 40)
    features = target.read_features(batch, drafter.needs)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = drafter(batch, features, Noise(0))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(loss)
    return losses
