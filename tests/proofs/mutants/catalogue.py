"""Seeded bugs: each one exact replacement of text in draftlab, and the tests that must fail.

Every one is a slip that some public decoder shipped, or one like it. A text that is no longer
found once in its file is an error of this list.
"""

from dataclasses import dataclass

RULES = "tests/decoding/rules/"
SHIPPED = RULES + "test_shipped_law.py::test_every_rule_keeps_the_law_under_every_processor"
LENGTHS = RULES + "test_shipped_law.py::test_every_rule_keeps_the_law_however_many_nodes_count"
GREEDY = (
    "tests/decoding/test_decoder.py::"
    "test_greedy_output_equals_plain_decoding_for_every_number_of_right_drafts"
)
ENGINE = "tests/proofs/test_engine_law.py::test_whole_answers_have_the_targets_law"
HOUSE = (
    "tests/proofs/test_engine_law.py::"
    "test_drafters_of_the_house_keep_the_law_with_what_they_remember"
)
TREES = "tests/decoding/test_trees.py::test_every_path_of_a_tree_gives_the_plain_answer"
HISTORY = "tests/proofs/test_observed_paths.py::test_any_history_of_rounds_equals_a_fresh_prefill"
POISON = "tests/proofs/test_poisoned_memory.py::test_a_drafter_never_sees_past_a_rows_end"
ROWS = "tests/decoding/test_mixed_rows.py"
STATIC = "tests/decoding/test_static_round.py"


@dataclass(frozen=True)
class Mutant:
    """A seeded bug.

    Attributes:
        name: what is wrong then, in words.
        file: inside draftlab.
        old: text that stands there once.
        new: what takes its place.
        tests: arguments for pytest; one failure kills.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    # ---------------------------------------------------------------- rules
    Mutant(
        "a token of probability 0 is accepted at u = 0",
        "decoding/rules/speculative.py",
        "accept_uniforms.double() * q.double() < p.double()",
        "accept_uniforms.double() * q.double() <= p.double()",
        (RULES + "test_rule_properties.py",),
    ),
    Mutant(
        "the correction is drawn from p, not from the residual",
        "decoding/rules/chain.py",
        "residual(scaled, q)",
        "scaled",
        (SHIPPED, "-k", "plain"),
    ),
    Mutant(
        "block verification forgets the weight of p in the residual",
        "decoding/rules/chain.py",
        "scaled = p if scale is None else p * scale.to(p.dtype).unsqueeze(1)",
        "scaled = p",
        (SHIPPED, "-k", "block and plain"),
    ),
    Mutant(
        "the bonus token is drawn after the last draft but one",
        "decoding/rules/chain.py",
        "at = num_accepted.view(-1, 1, 1)",
        "at = num_accepted.clamp_max(depth - 1).view(-1, 1, 1)",
        (SHIPPED, "-k", "plain"),
    ),
    Mutant(
        "a row whose whole draft was accepted draws from the residual",
        "decoding/rules/chain.py",
        "rejected = (num_accepted < tree.num_nodes).unsqueeze(1)",
        "rejected = (num_accepted < depth).unsqueeze(1)",
        (LENGTHS,),
    ),
    Mutant(
        "nodes that do not count are judged",
        "decoding/rules/chain.py",
        "(accepted & counting_nodes(tree)).long()",
        "accepted.long()",
        (LENGTHS,),
    ),
    Mutant(
        "block verification stops at the first test that fails",
        "decoding/rules/block.py",
        "((columns + 1) * passes).max(1).values",
        "passes.long().cumprod(1).sum(1)",
        (SHIPPED, "-k", "block and plain"),
    ),
    Mutant(
        "block verification tests a whole draft like a part of it",
        "decoding/rules/block.py",
        "torch.where(whole, u < weights, partial)",
        "partial",
        (SHIPPED, "-k", "block and plain"),
    ),
    Mutant(
        "a rejected sibling stays in what is left of p",
        "decoding/rules/speculative.py",
        "p, mass = _without(tree, node, p, mass, rejected)",
        "pass",
        (SHIPPED, "-k", "wide and plain"),
    ),
    Mutant(
        "what is left of p is not normalised for the next sibling",
        "decoding/rules/speculative.py",
        "passes = thresholds[row, node] * mass < ",
        "passes = thresholds[row, node] < ",
        (SHIPPED, "-k", "wide and plain"),
    ),
    Mutant(
        "exact match compares a draft with the choice after it",
        "decoding/rules/exact_match.py",
        "count_leading(tree.tokens == target_ids[:, :-1], tree)",
        "count_leading(tree.tokens == target_ids[:, 1:], tree)",
        (GREEDY,),
    ),
    # ---------------------------------------------------------------- draws and laws
    Mutant(
        "acceptance reuses the uniforms that drew the drafts",
        "decoding/judging.py",
        "accept_uniforms=batch.uniforms(Purpose.ACCEPT,",
        "accept_uniforms=batch.uniforms(Purpose.DRAFT,",
        (ENGINE, "-k", "speculative-top"),
    ),
    Mutant(
        "the next token reuses the uniform of acceptance",
        "decoding/judging.py",
        "batch.uniforms(Purpose.RESAMPLE, 1)",
        "batch.uniforms(Purpose.ACCEPT, 1)",
        (ENGINE, "-k", "speculative-top"),
    ),
    Mutant(
        "every round draws the same numbers",
        "decoding/batch.py",
        "turns = first + self.columns(_ROUNDS_AHEAD).view(-1, 1, 1)",
        "turns = first * 0 + self.columns(_ROUNDS_AHEAD).view(-1, 1, 1) * 0",
        (ENGINE, "-k", "speculative-top"),
    ),
    Mutant(
        "sampled-verify draws every depth with one number",
        "decoding/batch.py",
        "places = self._places.unsqueeze(1) + depths",
        "places = self._places.unsqueeze(1) + 0 * depths",
        (
            "tests/decoding/test_decoder.py::"
            "test_sampled_verify_gives_the_text_of_plain_sampling_token_for_token",
        ),
    ),
    Mutant(
        "a drafter tells its law at temperature 1, whatever it drew at",
        "drafters/_chain.py",
        "self._laws.append(law)",
        "self._laws.append(logits.softmax(-1))",
        (HOUSE, "-k", "eagle3-speculative"),
    ),
    Mutant(
        "an id of probability 0 can be drawn",
        "sampling/probabilities.py",
        "torch.searchsorted(cumulative, threshold, right=True)",
        "torch.searchsorted(cumulative, threshold)",
        ("tests/sampling/test_probabilities.py", "-k", "without_mass"),
    ),
    Mutant(
        "top-k keeps exactly k among ties",
        "sampling/probabilities.py",
        "return logits.masked_fill(logits < largest.gather(-1, place), -torch.inf)",
        "rank = logits.sort(-1, descending=True, stable=True).indices.argsort(-1)\n"
        "    return logits.masked_fill(rank > place, -torch.inf)",
        ("tests/sampling/test_probabilities.py",),
    ),
    Mutant(
        "penalties do not see the drafts before a node",
        "sampling/context.py",
        ".unsqueeze(1) + drafted\n",
        ".unsqueeze(1) + 0 * drafted\n",
        (ENGINE, "-k", "speculative-penalties or block-penalties"),
    ),
    Mutant(
        "the least length is counted without the drafts before a node",
        "sampling/context.py",
        ".unsqueeze(1) + sees.sum(2)",
        ".unsqueeze(1) + 0 * sees.sum(2)",
        (ENGINE, "-k", "speculative-no"),
    ),
    Mutant(
        "an end token may come one token early",
        "sampling/probabilities.py",
        "context.num_emitted < part.values",
        "context.num_emitted < part.values - 1",
        (ENGINE, "-k", "speculative-no"),
    ),
    Mutant(
        "all rows are sampled as the first one is",
        "decoding/batch.py",
        "return laws[0] if alike else SamplingRows.of(laws, self._device)",
        "return laws[0]",
        (ROWS, "-k", "32_ragged"),
    ),
    # ---------------------------------------------------------------- drafts and their cuts
    Mutant(
        "a chain is cut anywhere it is unsure, not at the first such node",
        "decoding/proposing.py",
        "sure.long().cumprod(1).sum(1)",
        "sure.long().sum(1)",
        ("tests/decoding/test_adaptive_length.py", ENGINE, "-k", "cut"),
    ),
    Mutant(
        "the length chosen by cost looks at nodes behind it",
        "decoding/proposing.py",
        "may_look_ahead=not budget.draws",
        "may_look_ahead=True",
        ("tests/proofs/test_engine_law.py", "-k", "look_behind"),
    ),
    Mutant(
        "what a resting drafter missed is shown in part",
        "decoding/deferred.py",
        "torch.stack([seen.lengths for seen in kept]).sum(0)",
        "torch.stack([seen.lengths for seen in kept]).amax(0)",
        ("tests/decoding/test_fallback.py", "-k", "resting or come_and_go"),
    ),
    # ---------------------------------------------------------------- rounds
    Mutant(
        "a row moves on by what was accepted, the next token left out",
        "decoding/batch.py",
        "moved = verdict.num_accepted + 1",
        "moved = verdict.num_accepted",
        (GREEDY,),
    ),
    Mutant(
        "end tokens are looked for in the last place of a run only",
        "decoding/slots.py",
        "if token in eos_ids:",
        "if token in eos_ids and len(kept) == len(tokens):",
        ("tests/decoding/test_decoder.py", "-k", "end_token"),
    ),
    Mutant(
        "an answer may be one token longer than its limit",
        "decoding/slots.py",
        "if len(self.output_ids) + len(kept) == self.limit:",
        "if len(self.output_ids) + len(kept) == self.limit + 1:",
        ("tests/decoding/test_decoder.py", "-k", "limit_holds"),
    ),
    Mutant(
        "a drafter is not told that a row left its slot",
        "decoding/decoder.py",
        "crossing.close(self.drafter, batch.state, leaving)",
        "pass",
        (GREEDY,),
    ),
    Mutant(
        "the path shown to a drafter ends with its own draft, not with the next token",
        "decoding/committing.py",
        "1, verdict.num_accepted.unsqueeze(1), next_ids\n",
        "1, verdict.num_accepted.unsqueeze(1), next_ids * 0\n",
        ("tests/decoding/test_decoder.py", "-k", "observes_every_position"),
    ),
    Mutant(
        "at a chunk's edge a prompt token is paired with the newest one",
        "decoding/prefill.py",
        "row.text_ids[base + 1 : base + 1 + len(chunk)]",
        "[*chunk[1:], row.text_ids[-1]][: len(chunk)]",
        ("tests/decoding/test_decoder.py", "-k", "observes_every_position"),
    ),
    # ---------------------------------------------------------------- trees
    Mutant(
        "siblings see each other",
        "targets/step.py",
        "seen = (offset < 0) | (inside & self.ancestors.gather(2, index))",
        "seen = offset <= self.columns.view(1, -1, 1)",
        (TREES,),
    ),
    Mutant(
        "a tree's nodes take their slot for their position",
        "decoding/decoder.py",
        "depths, ancestors = place_nodes(tree.parents)",
        "_, ancestors = place_nodes(tree.parents)",
        (TREES,),
    ),
    Mutant(
        "the accepted path of a tree is not moved together",
        "decoding/decoder.py",
        "if outcome.has_jumps:",
        "if outcome.has_jumps and outcome.deepest > 99:",
        (TREES,),
    ),
    Mutant(
        "the path is moved in the order of slots of another row",
        "targets/cache.py",
        "source = torch.where(path >= 0, base.unsqueeze(1) + 1 + path, to)",
        "source = torch.where(path >= 0, base.unsqueeze(1) + path, to)",
        (TREES,),
    ),
    # ---------------------------------------------------------------- memory
    Mutant(
        "a token sees the slot after its own",
        "targets/step.py",
        "seen = offset <= self.columns.view(1, -1, 1)",
        "seen = offset <= self.columns.view(1, -1, 1) + 1",
        (GREEDY,),
    ),
    Mutant(
        "a sliding window is one token too wide",
        "targets/step.py",
        "depths.unsqueeze(2) - window",
        "depths.unsqueeze(2) - window - 1",
        ("tests/targets/test_adapter.py", "-k", "gemma3 or mistral"),
    ),
    Mutant(
        "the first slots are read instead of the rows' own",
        "targets/cache.py",
        "return keys[rows, :, :live], values[rows, :, :live]",
        "n = rows.shape[0]; return keys[:n, :, :live], values[:n, :, :live]",
        ("tests/decoding/test_decoder.py", "-k", "different_numbers"),
    ),
    Mutant(
        "fresh memory holds NaN",
        "targets/cache.py",
        "self._storage = torch.zeros(shape, dtype=dtype, device=device)",
        'self._storage = torch.full(shape, float("nan"), dtype=dtype, device=device)',
        (GREEDY,),
    ),
    # ---------------------------------------------------------------- what drafters remember
    Mutant(
        "hidden states are read one layer late",
        "targets/adapter.py",
        "layer.register_forward_hook(tap(index + 1))",
        "layer.register_forward_hook(tap(index))",
        ("tests/targets/test_adapter.py", "-k", "taps_equal"),
    ),
    Mutant(
        "a draft model counts on keys of its last draft, which it never ran",
        "drafters/_own_memory.py",
        "text.written.extend(draft[:-1])",
        "text.written.extend(draft)",
        (
            "tests/contract/test_drafter_contract.py::"
            "test_an_accepted_path_of_any_length_equals_a_fresh_prefill",
            "-k",
            "draft_model",
        ),
    ),
    Mutant(
        "a draft model keeps keys of drafts that were rejected",
        "drafters/_own_memory.py",
        "if self.written[self.settled] != self.ids[self.settled]:",
        "if self.settled < 0:",
        (HISTORY, "-k", "draft_model"),
    ),
    Mutant(
        "an EAGLE head goes on from a padding column",
        "drafters/_eagle_memory.py",
        "last=(seen.lengths - 1).clamp_min(0),",
        "last=torch.full_like(seen.lengths, seen.ids.shape[1] - 1),",
        (HISTORY, "-k", "eagle3"),
    ),
    Mutant(
        "an EAGLE head counts padding as observed",
        "drafters/_eagle_memory.py",
        "memory.lengths[seen.rows] = base + seen.lengths",
        "memory.lengths[seen.rows] = base + seen.ids.shape[1]",
        (HISTORY, "-k", "eagle3"),
    ),
    Mutant(
        "an EAGLE head drafts one position too far",
        "drafters/_eagle_memory.py",
        "positions=(lengths + (k - 1))",
        "positions=(lengths + k)",
        ("tests/drafters/test_self_fed_head.py", "-k", "chain_that_training_unrolled"),
    ),
    Mutant(
        "an EAGLE head looks at what lies past a row's end",
        "drafters/_eagle_memory.py",
        "is_level=False,\n        last=",
        "is_level=True,\n        last=",
        (POISON, HISTORY, "-k", "eagle3"),
    ),
    Mutant(
        "a Medusa head goes on from a padding column",
        "drafters/medusa.py",
        "last = (seen.lengths - 1).clamp_min(0)",
        "last = torch.full_like(seen.lengths, seen.ids.shape[1] - 1)",
        (HISTORY, "-k", "medusa"),
    ),
    # ---------------------------------------------------------------- rounds on the device alone
    Mutant(
        "rounds look no further than a chain's end, though a tree is wider",
        "decoding/graphs.py",
        "rounds * (self._plan.depth + 1) + self._plan.num_nodes + 1",
        "rounds * (self._plan.depth + 1) + self._plan.depth + 1",
        (STATIC, "-k", "no_node_lies_past"),
    ),
    Mutant(
        "memory ends where answers end, though a tree is not cut to their room",
        "decoding/graphs.py",
        "longest + self._plan.depth + self._plan.num_nodes + 1",
        "longest + self._plan.num_nodes + 1",
        (STATIC, "-k", "ends_inside_a_tree"),
    ),
    Mutant(
        "an accepted path stays where its tree was",
        "decoding/static_round.py",
        "self._kv.compact(self._rows, facts.base, path)",
        "pass",
        (STATIC, "-k", "off_the_first_branch"),
    ),
    Mutant(
        "siblings are drawn with replacement, and their laws say otherwise",
        "drafters/_growth.py",
        "left.index_copy_(1, parents, remaining)",
        "pass",
        ("tests/drafters/test_growth.py",),
    ),
    Mutant(
        "a foreign kernel's window is one token too wide",
        "targets/flash_chain.py",
        "(window - 1, 0)",
        "(window, 0)",
        ("tests/targets/test_flash_chain.py", "-k", "same_numbers"),
    ),
]
