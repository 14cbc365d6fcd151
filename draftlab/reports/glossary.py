"""What each figure means, and which one other engines print."""

GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "tau (acceptance length)",
        "Tokens emitted / verify steps, all prompts pooled; the target's own next token counts. "
        "Plain decoding is 1.0, the most is K + 1. Headline figure. Counted after cuts at the end "
        "token or the length limit, so the last step of an answer can count less.",
    ),
    ("tau, per conversation", "The same ratio for each prompt, then the plain mean over prompts."),
    (
        "tau, uncut",
        "1 + accepted draft tokens / verify steps, before those cuts; equals 1 + the sum of "
        "survival over depths.",
    ),
    (
        "verify step",
        "One proposal of up to K draft tokens, or of a tree of K levels, and one pass of the "
        "target over it. The pass that yields the first token belongs to prefill and is no verify "
        "step.",
    ),
    (
        "acceptance rate",
        "Accepted / proposed draft tokens. Tokens proposed after a rejected one count as proposed.",
    ),
    (
        "survival at depth k",
        "Share of verify steps that accepted at least k draft tokens.",
    ),
    (
        "alpha at depth k",
        "Of the steps that proposed a token at depth k and accepted all before it, the share that "
        "accepted it too. alpha 1 is how often the first guess is right. Of a tree, whose paths "
        "may end early, every step that accepted k - 1 tokens counts.",
    ),
    (
        "overlap at depth k",
        "Mean of the sum of min(p, q) over the vocabulary at depths reached: the expected alpha. "
        "Only when sampling.",
    ),
    (
        "decode speedup",
        "Baseline decode seconds a token / the drafter's, totals over the same prompts. Prefill is "
        "in neither.",
    ),
    (
        "end-to-end speedup",
        "The same with prefill and everything else around the call, over all output tokens.",
    ),
    (
        "cost of a step",
        "Seconds of a verify step / seconds of a plain decoding step. tau must exceed it for "
        "drafting to pay off; tau divided by it is the speedup.",
    ),
    (
        "repeats",
        "Share of output tokens inside a run of 16 tokens that the same answer had before. Loops "
        "are easy to draft, so tau without them stands beside tau.",
    ),
    (
        "95 % CI",
        "Acceptance: bootstrap over prompts (BCa), since steps of one prompt hang together. Speed: "
        "Student's t on the log of the ratio, prompts paired. Below 8 prompts none is given.",
    ),
    (
        "defect",
        "An output token whose logit lies below the target's largest by more than rounding between "
        "narrow and wide passes explains, or any token after an end token.",
    ),
)

ENGINES = (
    "vLLM prints tau uncut as mean acceptance length, the acceptance rate as draft acceptance "
    "rate, and survival (not alpha) as per-position acceptance rate.",
    "SGLang's accept_length is all output tokens / verify steps: the first token, which prefill "
    "gives, is counted, so it is higher than tau by 1 / (steps of an answer).",
    "TensorRT-LLM's iteration statistics print acceptanceLength = 1 + accepted / steps that "
    "drafted, which is tau uncut; its benchmark divides all output tokens by decoding iterations, "
    "first token included.",
)
